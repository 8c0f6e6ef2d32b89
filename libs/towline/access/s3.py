"""What each role may do to the store's objects, as IAM policy documents: MinIO, AWS and SeaweedFS take the same ones.

Everybody reads and lists. Nobody but `gc` deletes what others read, and `gc` looks first at who holds it: no policy can. Nor
can a policy say "create, but don't replace", except on AWS for the LOG: elsewhere Towline's conditional puts and digests do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from towline.access import roles
from towline.access.credentials import KeyPair
from towline.errors import UsageError
from towline.store import keys

Flavour = Literal["seaweedfs", "minio", "aws"]
ADMIN = "admin"
"""SeaweedFS' own identity that may do everything; MinIO and AWS have theirs already."""
_BLOBS = "blobs/*"
_BASE = f"{keys.relative('r', keys.anchor_record('r', 0)).removesuffix('.json')}*"
"""Entry 0's anchor: the base model, which its trainer uploads and nobody deletes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Keys below the run's, `*` at the end allowed: what may be put, what deleted, what never."""

    put: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    never_delete: tuple[str, ...] = ()
    makes_bucket: bool = False


RULES = {
    roles.TRAINER: Rules(put=("log/*", "versions/*", "checkpoints/*", "fingerprints/*", _BASE, _BLOBS)),
    roles.WORKER: Rules(put=(_BLOBS,)),
    roles.REWARD: Rules(put=(_BLOBS,)),
    roles.BUFFER: Rules(put=(_BLOBS,), delete=(_BLOBS,)),
    roles.PUBLISHER: Rules(put=("log/*", "anchors/*", "head.json", _BLOBS)),
    roles.GATEWAY: Rules(put=("idempotency/*", "sessions/*", _BLOBS), delete=("idempotency/*", "sessions/*")),
    roles.OPERATOR: Rules(
        put=("log/*", "head.json", "versions/*", "anchors/*", "pins/*", "holds/*", "clock", _BLOBS),
        delete=("pins/*", "holds/*", "tombstones/*"),
    ),
    roles.VIEWER: Rules(),
    roles.GC: Rules(
        put=("tombstones/*", "clock"),
        delete=("versions/*", "anchors/*", "checkpoints/*", "tombstones/*", "holds/*"),
        never_delete=(_BASE, "log/*"),
    ),
    roles.INIT: Rules(makes_bucket=True),
}
CHECK = "towline-check"
"""What every writer creates to see that the store refuses a second conditional put."""


def policy(role: str, bucket: str, runs: Sequence[str], *, prefix: str = "", flavour: Flavour = "aws") -> dict[str, Any]:
    """The role's policy document, for runs under one store URL s3://bucket/prefix."""
    rules = RULES[roles.checked(role)]
    if not runs:
        raise UsageError("name at least one run", code="run_missing")
    whole = f"arn:aws:s3:::{bucket}"
    root = f"{whole}/{prefix.strip('/')}/" if prefix.strip("/") else f"{whole}/"

    def below(patterns: Sequence[str]) -> list[str]:
        return [f"{root}{run}/{pattern}" for run in runs for pattern in patterns]

    checks = [f"{root}{CHECK}*"] if rules.put or rules.makes_bucket else []
    statements = [
        _allow("ListBucket", "GetBucketLocation", resources=[whole]),
        _allow("GetObject", resources=[*below(["*"]), *checks]),
    ]
    if rules.makes_bucket:
        statements.append(_allow("CreateBucket", resources=[whole]))
    if below(rules.put) + checks:
        statements.append(
            _allow("PutObject", "AbortMultipartUpload", "ListMultipartUploadParts", resources=below(rules.put) + checks)
        )
    deletes = below(rules.delete) + (checks if rules.makes_bucket else [])
    if deletes:
        statements.append(_allow("DeleteObject", resources=deletes))
    if rules.never_delete:
        statements.append({"Effect": "Deny", "Action": ["s3:DeleteObject"], "Resource": below(rules.never_delete)})
    if flavour == "aws" and "log/*" in rules.put:
        create_only = {"Null": {"s3:if-none-match": "true"}}
        statements.append({"Effect": "Deny", "Action": ["s3:PutObject"], "Resource": below(["log/*"]), "Condition": create_only})
    return {"Version": "2012-10-17", "Statement": statements}


def seaweedfs_config(policies: Mapping[str, dict[str, Any]], pairs: Mapping[str, KeyPair]) -> str:
    """SeaweedFS' `-s3.config`: an identity for each role, with its policy, and the administrator's. It holds the keys."""
    identities: list[dict[str, Any]] = []
    for name, pair in pairs.items():
        granted: dict[str, Any] = {"actions": ["Admin"]} if name == ADMIN else {"policyNames": [name]}
        identities.append({"name": name, "credentials": [{"accessKey": pair.access, "secretKey": pair.secret}], **granted})
    documents = [{"name": role, "content": json.dumps(document)} for role, document in policies.items()]
    return json.dumps({"identities": identities, "policies": documents}, indent=1) + "\n"


def minio_script(names: Sequence[str]) -> str:
    """A shell script that gives users and policies, which lie beside it, to a MinIO server; the keys come from their files.

    It may run again, and brings changed policies: `attach` alone fails where it has been done, so that is asked first.
    """
    lines = ["#!/bin/sh", "# sh apply.sh ALIAS: ALIAS is mc's name of the server, with an administrator's keys.", "set -eu"]
    lines += ['alias=${1:?"give the name that mc has for the server"}', 'cd "$(dirname "$0")"']
    for role in names:
        lines += [
            f'mc admin policy create "$alias" towline-{role} {role}.policy.json',
            f'mc admin user add "$alias" "$(cat {role}.s3-access)" "$(cat {role}.s3-secret)"',
            f'case "$(mc admin user info "$alias" "$(cat {role}.s3-access)")" in *towline-{role}*) ;; *)',
            f'    mc admin policy attach "$alias" towline-{role} --user "$(cat {role}.s3-access)" ;; esac',
        ]
    return "\n".join(lines) + "\n"


def _allow(*actions: str, resources: Sequence[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": [f"s3:{action}" for action in actions], "Resource": list(resources)}
