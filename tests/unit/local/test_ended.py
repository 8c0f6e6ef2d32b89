"""What a person is told who starts a run that has ended."""

from __future__ import annotations

import pytest

from towline.contract.control import VERIFY_FAILED_ALL
from towline.local.ended import ended_line


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("steps", "--steps goes on with it"),
        ("end_of_data", "used up its prompts"),
        (VERIFY_FAILED_ALL, "`towline dead list small`, put it right"),
        ("somebody_said_so", "was ended (somebody_said_so)"),
    ],
)
def test_it_says_why_and_how_to_go_on(reason: str, says: str) -> None:
    line = ended_line("small", reason)
    assert line.startswith("run small has ended already: it ")
    assert says in line
    assert "{" not in line
    # More steps help only where there were too few.
    assert (reason == "steps") == ("--steps goes on with it" in line)
    assert (reason != "steps") == ("`towline run fork small --from latest`" in line)
