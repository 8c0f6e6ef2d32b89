"""What each service's status figures are called as Prometheus metrics: data. docs/metrics.md is generated from it.

A figure is named by its path (`partials.written`); one that is a mapping of numbers has the label that its keys are values of.
What counts since the process's start, or over the run's life, is a counter; it may go back only where its process starts anew.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Shown(NamedTuple):
    """`metric` is without `towline_SERVICE_`, and of a counter without `_total`."""

    figure: str
    metric: str
    text: str
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""


def _counter(figure: str, metric: str, text: str, label: str = "") -> Shown:
    return Shown(figure, metric, text, "counter", label)


BUFFER = (
    Shown("depth", "depth", "Batches that the newest version was trained on"),
    Shown("steps", "target_depth", "The depth at which the run is over (run.steps)"),
    Shown("epoch", "epoch", "LOG entry of the trainer's newest open; grows with each start of a trainer"),
    _counter("batches", "batches", "Batches formed; after a fork those that it voided don't count"),
    _counter("admitted", "samples_admitted", "Samples admitted"),
    _counter("trained", "samples_trained", "Samples in batches that the newest version was trained on"),
    _counter("evaluated", "samples_evaluated", "Samples of closed evaluations"),
    _counter("dropped", "samples_dropped", "Samples dropped, by reason", "reason"),
    Shown("open", "samples_open", "Samples admitted and neither trained, evaluated nor dropped"),
    Shown("open_groups", "groups_open", "Groups admitted to train and not yet in a batch"),
    Shown("complete_groups", "groups_complete", "Groups whose samples are all scored, waiting for a batch"),
    _counter("late", "outcomes_late", "Outcomes of samples that were closed already"),
    _counter("turned_away", "external_groups_refused", "External groups that were dropped unadmitted, by reason", "reason"),
    Shown("offered_groups", "external_groups_offered", "External groups that wait for admission"),
    Shown("staleness", "staleness_depths", "Staleness of trained samples, in depths: mean, p99, max", label="statistic"),
    Shown("over_stale", "over_stale", "Trained samples with tokens over the bound, those tokens, the greatest staleness",
          label="statistic"),
    Shown("staleness_token_mean", "staleness_token_mean_depths", "Mean staleness of trained policy tokens, in depths"),
    Shown("requeue", "groups_to_requeue", "Dropped groups whose prompts wait to be admitted again"),
    _counter("requeued_on_request", "requeues_granted", "Dropped groups admitted again because somebody asked"),
    _counter("requests_refused", "requeues_refused", "Such requests that were refused"),
    Shown("resampled", "resampled_groups", "Groups filtered or requeued since the last batch"),
    Shown("mixed_version_share", "mixed_version_ratio", "Share of the scored samples that several versions sampled"),
    Shown("tokens_trained_mean", "trained_sample_tokens_mean", "Mean policy tokens of trained samples"),
    Shown("tokens_scored_mean", "scored_sample_tokens_mean", "Mean policy tokens of all scored samples"),
    Shown("length_bias", "length_bias_ratio", "The first of these over the second; below 1 long samples are lost"),
    Shown("reward_first", "evaluation_reward_first", "Mean reward of the first evaluation"),
    Shown("reward_last", "evaluation_reward", "Mean reward of the newest evaluation"),
    Shown("consumer_waiting_share", "trainer_waiting_ratio", "Share of looks at which no batch waited for the trainer"),
    Shown("producer_blocked_share", "admission_blocked_ratio", "Share of looks at which every group was in and none had room"),
    Shown("oldest_open_seconds", "oldest_open_group_age_seconds", "Age of the oldest open group"),
    Shown("oldest_complete_seconds", "oldest_complete_group_age_seconds", "Age of the oldest complete group"),
    Shown("oldest_batch_seconds", "oldest_batch_age_seconds", "How long the oldest unconsumed batch has stood"),
    Shown("pacing_band_groups", "pacing_band_groups", "Groups that pacing lets under way"),
    Shown("pacing_room_groups", "pacing_room_groups", "Groups that pacing had room for at the last look"),
    Shown("fleet_slots", "fleet_slots", "Slots of the replicas in the registry"),
    Shown("finished", "finished", "1 once the run is over"),
)  # fmt: skip

WORKER = (
    Shown("version", "version", "LOG number of the version that is served"),
    Shown("depth", "depth", "Its depth"),
    Shown("version_lag_depths", "version_lag_depths", "Depths between it and the newest version of the line"),
    Shown("version_lag_seconds", "version_lag_seconds", "Age of the oldest version of the line that it doesn't serve yet"),
    Shown("busy", "num_samples_running", "Slots in use, by tasks and requests"),
    Shown("slots", "slots", "Slots of the engine"),
    Shown("limit", "sample_limit", "Samples that it asks for at a time"),
    Shown("queue_seconds_mean", "queue_seconds_mean", "Mean wait of a sample in the engine's queue"),
    Shown("tokens_per_second", "sample_tokens_per_second", "Tokens a second of one running sample"),
    _counter("trajectories", "trajectories", "Trajectories delivered"),
    _counter("tokens", "generation_tokens", "Policy tokens of delivered trajectories"),
    _counter("superseded", "trajectories_superseded", "Trajectories that another attempt had delivered first"),
    _counter("cancelled", "tasks_cancelled", "Tasks given up because the buffer cancelled them"),
    _counter("handed_over", "tasks_handed_over", "Tasks given back unfinished at a drain"),
    _counter("failures", "attempts_failed", "Failed attempts, by stage", "stage"),
    _counter("partials.written", "partials_written", "PARTIALs written"),
    _counter("partials.failed", "partials_failed", "PARTIALs that couldn't be written"),
    _counter("partials.resumed", "partials_resumed", "Samples gone on with from a PARTIAL"),
    _counter("partials_refused", "partials_refused", "PARTIALs that couldn't be used, by reason", "reason"),
    _counter("tokens_resumed", "tokens_resumed", "Policy tokens that came with PARTIALs"),
    _counter("activations", "activations", "Versions activated"),
    _counter("wire_bytes", "weights_received_bytes", "Bytes of weights fetched"),
    Shown("failed_versions", "versions_failed", "Versions that couldn't be served here"),
    Shown("requests.running", "num_requests_running", "Requests of gateways that have a slot"),
    Shown("requests.waiting", "num_requests_waiting", "Requests of gateways that wait for one"),
    _counter("requests.served", "requests_served", "Requests brought to their end"),
    _counter("requests.tokens", "request_tokens", "Tokens sent to gateways"),
    _counter("requests.superseded", "requests_superseded", "Requests cut because the replica left their versions"),
    _counter("requests.handed_over", "requests_handed_over", "Requests given back at a stop"),
    _counter("requests.refusals", "requests_refused", "Requests that weren't taken, by code", "code"),
)  # fmt: skip

REWARD = (
    _counter("scored", "samples_scored", "Scores published"),
    _counter("failed", "samples_failed", "Samples given up: unreadable, or the verifier failed for good"),
    _counter("retried", "verifier_retries", "Deliveries given back for another attempt of the verifier"),
    _counter("repeated", "scores_repeated", "Scores that stood already"),
    Shown("reward_mean", "reward_mean", "Mean reward of this process's scores"),
    Shown("at_work", "deliveries_in_progress", "Deliveries in hand"),
    Shown("stuck", "verifier_calls_stuck", "Verifier calls that ran over their time and go on"),
)

TRAINER = (
    Shown("step", "optimizer_steps", "Optimiser steps along the lineage"),
    Shown("depth", "depth", "Depth of the last committed version"),
    Shown("epoch", "epoch", "LOG entry of its open"),
    Shown("loss", "loss", "Loss of the last step"),
    Shown("reward_mean", "reward_mean", "Mean reward of the last batch"),
    Shown("learning_rate", "learning_rate", "Learning rate of the last step"),
    Shown("gradient_norm", "gradient_norm", "Gradient norm of the last step, before clipping"),
    Shown("clip_low", "clip_low_ratio", "Share of tokens clipped below"),
    Shown("clip_high", "clip_high_ratio", "Share of tokens clipped above"),
    Shown("mismatch_kl", "mismatch_kl", "KL of the engine's logprobs to the trainer's, last step"),
    Shown("logprob_abs_diff", "logprob_abs_diff", "Mean absolute difference of these logprobs"),
    Shown("effective_sample_share", "effective_sample_ratio", "Effective sample size over the number of samples"),
    Shown("mismatch_kl_by_staleness", "mismatch_kl_by_staleness", "The KL by staleness in depths", label="staleness"),
    Shown("ratio_by_staleness", "importance_ratio_by_staleness", "Mean importance ratio by staleness", label="staleness"),
    _counter("batches", "batches", "Batches consumed"),
    _counter("tokens", "tokens", "Policy tokens trained on"),
    _counter("skipped_steps", "steps_skipped", "Optimiser steps skipped"),
    _counter("skipped_batches", "batches_skipped", "Batches consumed without a step"),
    _counter("skip_reasons", "skips", "Skipped steps and batches, by reason", "reason"),
    Shown("padding_share", "padding_ratio", "Share of padding in the last batch"),
    _counter("missing_rows", "rows_missing", "Batch rows that couldn't be trained on"),
    _counter("idle_seconds", "idle_seconds", "Seconds of waiting for a batch or, in sync mode, for a commit"),
    _counter("train_seconds", "train_seconds", "Seconds of computing steps"),
    _counter("snapshot_seconds", "snapshot_seconds", "Seconds for which training stood still to be copied"),
    _counter("encode_seconds", "encode_seconds", "Seconds of encoding versions"),
    _counter("upload_seconds", "upload_seconds", "Seconds of uploading them"),
    _counter("commit_seconds", "commit_seconds", "Seconds from snapshots to LOG entries"),
    _counter("versions", "versions", "Versions committed"),
    _counter("checkpoints", "checkpoints", "Checkpoints that versions name"),
    _counter("wire_bytes", "weights_sent_bytes", "Bytes of weights uploaded"),
    Shown("density", "delta_density_ratio", "Share of the weights that the last version changed"),
    _counter("density_sum", "delta_density_sum", "Sum of that share over versions"),
    Shown("model_bytes", "model_size_bytes", "Size of the model as it is published"),
    Shown("finished", "finished", "1 once it has trained the run to its end"),
)  # fmt: skip

PUBLISHER = (
    Shown("head", "head_version", "The newest epoch's head"),
    _counter("committed", "versions_committed", "Versions committed"),
    _counter("refusals", "versions_refused", "Versions refused, by code", "code"),
    _counter("verify_seconds", "verify_seconds", "Seconds of verifying staged versions"),
    _counter("commit_seconds", "commit_seconds", "Seconds of writing LOG entries"),
    _counter("anchors", "anchors", "Anchors written"),
    Shown("finished", "finished", "1 once the run is over"),
)

GATEWAY = (
    Shown("running", "num_requests_running", "Requests at work"),
    _counter("continued", "requests_continued", "Calls that went on at another replica after tokens that stood"),
    Shown("versions", "replicas", "Replicas that serve, by version", label="version"),
)

CATALOGUE: dict[str, tuple[Shown, ...]] = {
    "buffer": BUFFER,
    "rollout_worker": WORKER,
    "reward": REWARD,
    "trainer": TRAINER,
    "publisher": PUBLISHER,
    "gateway": GATEWAY,
}
LEFT_OUT: dict[str, frozenset[str]] = {
    "buffer": frozenset({"evals", "state", "end_reason", "unpaced", "staleness_counts"}),
    "rollout_worker": frozenset({"requests.refused", "prepare_seconds", "pause_seconds"}),
    "reward": frozenset({"last_error"}),
    "publisher": frozenset({"refused"}),
    "gateway": frozenset({"api_port", "api_url", "grpc_port", "ui_url", "trajectories", "tokens"}),
}
"""Figures that are no metrics, or are sums of one, or that a counter has already (a gateway's sessions_finished)."""
