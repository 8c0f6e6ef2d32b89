"""What each role may say and hear on the bus, by hand: an oracle for what `towline.access.nats` makes from the topology."""

from __future__ import annotations

from towline.access.roles import ROLES

RUN, OTHER = "one", "other"
TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY = "trainer", "rollout-worker", "reward", "buffer", "publisher", "gateway"
OPERATOR, VIEWER, GC, INIT = "operator", "viewer", "gc", "init"
SERVICES = {TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY}
PEOPLE = {OPERATOR, VIEWER}
READERS = PEOPLE | {GATEWAY}  # whose web view shows everything
READ_CONTROL = {TRAINER, WORKER, BUFFER, GATEWAY} | PEOPLE
API = "$JS.API"
S = f"towline_{RUN}"

MAY_PUBLISH: dict[str, set[str]] = {
    # CONTROL is the buffer's
    **{f"towline.{RUN}.control.{kind}": {BUFFER} for kind in ("writer", "batch", "drop", "end", "snapshot", "fork", "admit")},
    f"towline.{RUN}.control.task.train": {BUFFER},
    f"towline.{RUN}.control.task.eval.7": {BUFFER},
    f"towline.{RUN}.control.reissue.train": {BUFFER},
    # data
    f"towline.{RUN}.trajectory.5.0": {WORKER, GATEWAY},
    f"towline.{RUN}.trajectory.ext-5.0": {WORKER, GATEWAY},
    f"towline.{RUN}.outcome.score.5.0": {REWARD},
    f"towline.{RUN}.outcome.failure.5.0": {WORKER, REWARD, GATEWAY},
    f"towline.{RUN}.partial.5.0": {WORKER},
    f"towline.{RUN}.policy.opened": {TRAINER},
    f"towline.{RUN}.policy.staged": {TRAINER},
    f"towline.{RUN}.policy.committed": {PUBLISHER},
    f"towline.{RUN}.policy.refused": {PUBLISHER},
    f"towline.{RUN}.dead.rollout": {WORKER},
    f"towline.{RUN}.dead.partial": {WORKER},
    f"towline.{RUN}.dead.reward": {REWARD},
    f"towline.{RUN}.dead.publisher": {PUBLISHER},
    f"towline.{RUN}.dead.outcome": {BUFFER},
    f"towline.{RUN}.dead.requeue.3": {OPERATOR},
    f"towline.{RUN}.serve.w0": {GATEWAY},
    f"towline.{RUN}.serve.w0.cancel": {GATEWAY},
    # buckets
    f"$KV.{S}_status.buffer.0": {BUFFER},
    f"$KV.{S}_status.trainer.0": {TRAINER},
    f"$KV.{S}_status.rollout_worker.0": {WORKER},
    f"$KV.{S}_status.reward.0": {REWARD},
    f"$KV.{S}_status.publisher.0": {PUBLISHER},
    f"$KV.{S}_status.gateway.0": {GATEWAY},
    f"$KV.{S}_leases.buffer": {BUFFER},
    f"$KV.{S}_leases.trainer": {TRAINER},
    f"$KV.{S}_replicas.w0": {WORKER},
    f"$KV.{S}_acks.w0": {WORKER},
    f"$KV.{S}_sessions.a": {GATEWAY},
    f"$KV.{S}_idempotency.a.b": {GATEWAY},
    # another role's answers
    "_INBOX.gateway.x": {WORKER},
    **{f"_INBOX.{role}.x": set[str]() for role in ROLES if role != GATEWAY},
    # streams
    **{f"{API}.STREAM.CREATE.{S}_{key}": {INIT} for key in ("CONTROL", "TRAJECTORY", "DEAD")},
    f"{API}.STREAM.UPDATE.{S}_CONTROL": {INIT},
    f"{API}.STREAM.CREATE.KV_{S}_leases": {INIT},
    f"{API}.STREAM.DELETE.{S}_CONTROL": set(),
    f"{API}.STREAM.MSG.DELETE.{S}_CONTROL": set(),
    f"{API}.STREAM.DELETE.KV_{S}_leases": set(),
    f"{API}.STREAM.PURGE.{S}_CONTROL": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_OUTCOME": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_TRAJECTORY": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_PARTIAL": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_DEAD": {OPERATOR},
    f"{API}.STREAM.PURGE.{S}_POLICY": set(),
    f"{API}.STREAM.PURGE.KV_{S}_sessions": set(),
    f"{API}.STREAM.INFO.{S}_CONTROL": set(ROLES),
    f"{API}.STREAM.LIST": set(),
    f"{API}.STREAM.NAMES": set(),
    f"{API}.INFO": {OPERATOR, VIEWER, INIT},
    # single messages
    f"{API}.STREAM.MSG.GET.{S}_CONTROL": SERVICES | PEOPLE | {GC},
    f"{API}.STREAM.MSG.GET.{S}_TRAJECTORY": {TRAINER, WORKER, REWARD, BUFFER} | READERS,
    f"{API}.DIRECT.GET.{S}_TRAJECTORY": {TRAINER, WORKER, REWARD, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_OUTCOME": {REWARD, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_PARTIAL": {WORKER, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_POLICY": {TRAINER, PUBLISHER, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_DEAD": {BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_sessions": READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_idempotency": READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_leases": {BUFFER, TRAINER} | READERS,
    # whole streams, by consumers of one's own
    f"{API}.CONSUMER.CREATE.{S}_CONTROL.r1": READ_CONTROL,
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.r1": READ_CONTROL,
    f"{API}.CONSUMER.CREATE.{S}_TRAJECTORY.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.{S}_OUTCOME.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.{S}_PARTIAL.r1": READERS,
    f"{API}.CONSUMER.CREATE.{S}_POLICY.r1": READERS,
    f"{API}.CONSUMER.CREATE.{S}_DEAD.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.KV_{S}_replicas.r1": {WORKER, BUFFER, GC} | READERS,
    f"{API}.CONSUMER.CREATE.KV_{S}_sessions.r1": READERS,
    # consumers that are shared
    f"{API}.CONSUMER.CREATE.{S}_CONTROL.lane-train": {WORKER, BUFFER, INIT},
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-train": {WORKER},
    f"{API}.CONSUMER.DELETE.{S}_CONTROL.lane-train": set(),
    f"$JS.ACK.{S}_CONTROL.lane-train.1.2.3.4.5": {WORKER},
    f"$JS.ACK.hub.ACCOUNT.{S}_CONTROL.lane-train.1.2.3.4.5.x": {WORKER},
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-session": {GATEWAY},
    f"$JS.ACK.{S}_CONTROL.lane-session.1.2.3.4.5": {GATEWAY, WORKER},
    f"{API}.CONSUMER.CREATE.{S}_TRAJECTORY.reward": {REWARD, BUFFER, INIT},
    f"{API}.CONSUMER.MSG.NEXT.{S}_TRAJECTORY.reward": {REWARD},
    f"{API}.CONSUMER.DELETE.{S}_TRAJECTORY.reward": {BUFFER},
    f"$JS.ACK.{S}_TRAJECTORY.reward.1.2.3.4.5": {REWARD},
    f"{API}.CONSUMER.MSG.NEXT.{S}_POLICY.publisher": {PUBLISHER},
    f"$JS.ACK.{S}_POLICY.publisher.1.2.3.4.5": {PUBLISHER},
    f"{API}.CONSUMER.INFO.{S}_POLICY.publisher": {PUBLISHER, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.INFO.{S}_TRAJECTORY.reward": {REWARD, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.INFO.{S}_CONTROL.lane-train": {WORKER, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.CREATE.{S}_POLICY.publisher": {PUBLISHER, INIT},
    # A wildcard stands for a whole name, so whoever reads CONTROL could take an evaluation's tasks: docs/design/090-access.md
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-eval-7": READ_CONTROL,
    f"$JS.ACK.{S}_CONTROL.lane-eval-7.1.2.3.4.5": {WORKER},
    # what no run has, and another run
    "anything": set(),
    "$SYS.REQ.SERVER.PING": set(),
    f"towline.{OTHER}.control.batch": set(),
    f"towline.{OTHER}.trajectory.5.0": set(),
    f"{API}.STREAM.INFO.towline_{OTHER}_CONTROL": set(),
    f"$KV.towline_{OTHER}_status.buffer.0": set(),
}
MAY_SUBSCRIBE: dict[str, set[str]] = {
    **{f"_INBOX.{role}.>": {role} for role in ROLES},
    "_INBOX.>": set(),
    ">": set(),
    f"towline.{RUN}.>": set(),
    f"towline.{RUN}.control.>": set(),
    f"towline.{RUN}.trajectory.>": set(),
    f"towline.{RUN}.policy.opened": {TRAINER, WORKER, BUFFER, GATEWAY},
    f"towline.{RUN}.policy.committed": {TRAINER, WORKER, BUFFER, GATEWAY},
    f"towline.{RUN}.policy.refused": {TRAINER},
    f"towline.{RUN}.policy.staged": set(),
    f"towline.{RUN}.serve.w0": {WORKER},
    f"towline.{RUN}.serve.w0.cancel": {WORKER},
    f"towline.{RUN}.serve.>": {WORKER},  # the server takes it for one of serve.*; there is nothing else below
    "$JS.API.>": set(),
    "$KV.>": set(),
}
