"""`towline simulate RUN.toml`: a run as discrete events, before the machines are rented."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.numbers import finite
from towline.cli.paths import file_to_write
from towline.errors import TowlineError, UsageError

Toml = Annotated[Path, typer.Argument(metavar="RUN_OR_SCENARIO.toml", help="A run's TOML file, or a load test's.")]

SURE = {"within": "surely within", "off": "surely off", "unsure": "noise may decide"}


def simulate(
    toml: Toml,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of lengths and failures; else run.seed.")] = None,
    until: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Simulated seconds; else to the run's last step.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="Take the hops' times from a load test's result.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RESULT", help="Compare with a load test's result, or with those of a folder."),
    ] = None,
    within: Annotated[float, typer.Option(min=0, callback=finite, help="With --against: how far off a figure may be.")] = 0.1,
    seeds: Annotated[int, typer.Option(min=5, help="With --against of one result: simulations that tell the noise.")] = 16,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", callback=file_to_write, help="Write the result as a JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate hours of a run in seconds: any number of workers, links, failures; the same file as the run's.

    Lengths and speeds are the synthetic engine's (rollout.arguments), or a recorded run's (load.lengths_from); hops' times are
    the table `simulate`, or a result's (--calibrate; else that of --against, where the file has no such table). With --against
    exit status 1 where a figure is off by more than --within; its margin says how sure that is.
    """
    try:
        from towline.simulate.comparison import against as compared
        from towline.simulate.outcome import calibrated
        from towline.simulate.outcome import simulate as run
    except ModuleNotFoundError as error:
        if error.name != "simpy":
            raise
        raise UsageError("towline simulate needs simpy: pip install 'towline[simulate]'", code="simpy_missing") from None
    from towline.cli.recording import scenario_of
    from towline.cli.runs import _overrides
    from towline.loadtest.result import read_result, read_results
    from towline.loadtest.text import rows

    with tempfile.TemporaryDirectory(prefix="towline-simulate-") as scratch:
        scenario = scenario_of(toml, _overrides(settings or []), Path(scratch))
        measured = read_results(against) if against is not None else []
        source = read_result(calibrate) if calibrate is not None else None
        if source is None and measured and not scenario.simulate.model_fields_set:
            source = measured[0]
        if source is not None:
            scenario = scenario.model_copy(update={"simulate": calibrated(source, scenario.simulate)})
        if measured and (seed is not None or until is not None):
            raise UsageError("--against takes seed and length from the result; leave --seed and --until out", code="against")
        checks, (result, *_) = compared(scenario, measured, seeds) if measured else ([], [run(scenario, seed=seed, until=until)])
    if output is not None:
        result.write(output)
    if as_json:
        print(
            json.dumps(
                {
                    "metrics": result.metrics,
                    "checks": [[one.metric, one.simulated, one.measured, one.off] for one in checks],
                    "margins": {one.metric: one.margin for one in checks},
                }
            )
        )
    else:
        seconds = result.metrics["simulated_seconds"]
        simulated = f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.0f} s"
        print(f"{scenario.load.workers:,} workers, {simulated} in {result.metrics['wall_seconds']:.1f} s")
        print("\n".join(f"  {label:<46} {number:,.4g}" for label, number in rows([result])))
        for one in checks:
            print(
                f"  {one.metric:<34} simulated {one.simulated:<10.4g} measured {one.measured:<10.4g} "
                f"off by {one.off:.1%} +- {one.margin:.1%}: {SURE[one.verdict(within)]}"
            )
    if worst := [one for one in checks if one.off > within]:
        noise = all(one.verdict(within) == "unsure" for one in worst)
        sure = ", which may be noise: compare with several results" if noise else ""
        raise TowlineError(
            f"{', '.join(one.metric for one in worst)}: off by more than {within:.0%}{sure}", code="simulation_off"
        )
