"""Where a run's bus and store are, and as whom a process comes to them.

A secret stands here by value or, better, by reference: the path of a file, which is read when it's needed and may be replaced
meanwhile. Each may come from the environment as well (`TOWLINE_BUS__NKEY_SEED_FILE`, `TOWLINE_STORE__SECRET_KEY`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, model_validator

from towline.config_loading import STRICT, Count, Positive
from towline.errors import UsageError

DEFAULT_ROLE = "operator"
"""Of whoever names none: a person at a command line. Services name theirs."""
SEED, CREDENTIALS, ACCESS_KEY, SECRET_KEY = ".nk", ".creds", ".s3-access", ".s3-secret"
"""After a role's name: its files in a folder of keys."""
_URL = re.compile(r"((nats|tls|wss?)://)?([^@/\s]*@)?(\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+)(:\d{1,5})?/?")
"""Of one server; a port alone may be left out, and nats://."""


class BusSettings(BaseModel):
    model_config = STRICT

    url: str = ""
    """nats://host:port[,…], tls:// where the connection must be encrypted; empty: `towline up` starts a server of its own."""
    keys_folder: str = ""
    """A folder with ROLE.nk or ROLE.creds for each role, as `towline access nats` writes it: each process takes its own."""
    nkey_seed_file: str = ""
    """An nkey's seed; comes before `keys_folder`."""
    credentials_file: str = ""
    """A user's JWT with its seed, as `towline access nats --jwt` writes it."""
    user: str = ""
    password: SecretStr = SecretStr("")
    password_file: str = ""
    token: SecretStr = SecretStr("")
    role: str = ""
    """Of `towline access`: who a process is. Empty: the service's own, operator for the command line."""
    inbox_prefix: str = ""
    """Under which answers come; empty: _INBOX.USER, or _INBOX.ROLE where no user is named."""
    tls_ca: str = ""
    """PEM file: whoever signed the server's certificate. With it, or a tls:// URL, a server without TLS is refused."""
    tls_cert: str = ""
    """PEM files, both or neither: the client's certificate, where the server asks for one."""
    tls_key: str = ""
    budget_bytes: Annotated[int, Field(ge=64 << 20)] = 4 << 30
    """Storage that the run's streams reserve on the server, in all."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Copies of each stream in a NATS cluster."""
    sites: tuple[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")], ...] = ()
    """Clusters beside home with a bus of their own, which go on while they are cut off (docs/design/092-several-clusters.md).
    Each one's name is its JetStream domain."""
    site: str = ""
    """Where this process is: one of `sites`, by TOWLINE_BUS__SITE there; empty: at home."""
    home_domain: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] = "home"
    """The JetStream domain of home's bus; of use where there are `sites`."""
    connect_timeout_seconds: Positive = 10.0
    max_in_flight_bytes: Count = 64 << 20

    @property
    def encrypted(self) -> bool:
        """Whether a connection without TLS is refused."""
        return bool(self.tls_ca or self.tls_cert) or self.url.startswith("tls://")

    @property
    def secret(self) -> str:
        """The password, by value or from its file."""
        return read_secret(self.password_file, "bus.password_file") or self.password.get_secret_value()

    @property
    def seed(self) -> str:
        """The nkey's seed: `nkey_seed_file`'s, or the role's; "" where another way to come is named, or none."""
        if self.credentials:
            return ""
        if self.by_folder:
            return read_secret(f"{self.keys_folder}/{self.acts_as}{SEED}", "bus.keys_folder")
        return read_secret(self.nkey_seed_file, "bus.nkey_seed_file")

    @property
    def credentials(self) -> str:
        """The path of the user's token with its seed: `credentials_file`, or the role's where the folder has one; "" for none."""
        own = f"{self.keys_folder}/{self.acts_as}{CREDENTIALS}" if self.by_folder else ""
        return own if own and Path(own).is_file() else self.credentials_file

    @property
    def acts_as(self) -> str:
        """The role; "" where none is known."""
        return self.role or (DEFAULT_ROLE if self.by_folder else "")

    @property
    def by_folder(self) -> bool:
        """Whether the user's secret is the role's, in `keys_folder`."""
        named = self.nkey_seed_file or self.credentials_file or self.user or self.token.get_secret_value()
        return bool(self.keys_folder and not named)

    @model_validator(mode="after")
    def _agree(self) -> BusSettings:
        for url in self.url.split(",") if self.url else ():
            if not _URL.fullmatch(url.strip()):
                raise ValueError("url: write nats://HOST:PORT or tls://HOST:PORT, several with commas between them")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        if self.site and self.site not in self.sites:
            raise ValueError(f"site = {self.site!r} isn't one of sites ({', '.join(self.sites) or 'none'}): name it there, too")
        if len({self.home_domain, *self.sites}) <= len(self.sites):
            raise ValueError("sites and home_domain name JetStream domains: each must be another")
        if self.password.get_secret_value() and self.password_file:
            raise ValueError("give either password or password_file")
        ways = {"nkey_seed_file": self.nkey_seed_file, "credentials_file": self.credentials_file, "user": self.user,
                "token": self.token.get_secret_value()}  # fmt: skip
        named = [name for name, value in ways.items() if value]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: say in one way who comes")
        return self


class StoreSettings(BaseModel):
    model_config = STRICT

    url: str = ""
    """s3://bucket/prefix or file:///path; empty: `towline up` starts an S3 server of its own."""
    endpoint: str = ""
    """http(s)://host:port of the S3 server; empty: AWS_ENDPOINT_URL, then Amazon's."""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: SecretStr = SecretStr("")
    """Empty: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    access_key_file: str = ""
    """Files with one key each, both or neither; they come before `keys_folder`."""
    secret_key_file: str = ""
    keys_folder: str = ""
    """A folder with ROLE.s3-access and ROLE.s3-secret for each role, as `towline access s3` writes it."""
    role: str = ""
    """As bus.role."""
    ca: str = ""
    """PEM file: whoever signed the certificate of an https:// endpoint; empty: the usual authorities."""
    timeout_seconds: Positive = 30.0
    blobs_url: str = ""
    """Where `url` is a site's mirror: home's store, for payloads that are too large for a message. Empty: `url`."""
    blobs_endpoint: str = ""
    blobs_keys_folder: str = ""
    """Its endpoint and keys; empty: as above."""

    @property
    def for_blobs(self) -> StoreSettings:
        """How a process comes to the store of the run's blobs."""
        if not self.blobs_url:
            return self
        changed = {"url": self.blobs_url, "endpoint": self.blobs_endpoint or self.endpoint}
        if self.blobs_keys_folder:
            changed |= {"keys_folder": self.blobs_keys_folder, "access_key": "", "access_key_file": "", "secret_key_file": ""}
        return self.model_copy(update=changed)

    @property
    def keys(self) -> tuple[str, str]:
        """Access and secret key, by value or from their files; "" for what isn't set."""
        if self.keys_folder and not (self.access_key or self.access_key_file):
            own = f"{self.keys_folder}/{self.role or DEFAULT_ROLE}"
            return read_secret(own + ACCESS_KEY, "store.keys_folder"), read_secret(own + SECRET_KEY, "store.keys_folder")
        return (
            read_secret(self.access_key_file, "store.access_key_file") or self.access_key,
            read_secret(self.secret_key_file, "store.secret_key_file") or self.secret_key.get_secret_value(),
        )

    @model_validator(mode="after")
    def _agree(self) -> StoreSettings:
        if bool(self.access_key_file) != bool(self.secret_key_file):
            raise ValueError("access_key_file and secret_key_file go together: set both or neither")
        if self.access_key_file and (self.access_key or self.secret_key.get_secret_value()):
            raise ValueError("give the keys either by value or by file")
        return self


def read_secret(path: str, setting: str) -> str:
    """What the file holds, without blanks around it; "" where no path is given. `UsageError` names the setting."""
    if not path:
        return ""
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "") if isinstance(error, OSError) else "isn't text"
        if isinstance(error, FileNotFoundError) and setting.endswith("keys_folder"):
            reason += "; `towline access` writes a file for each role: correct the folder, or the role that is named"
        raise UsageError(f"{setting} = {path!r}: {reason}", code="secret_file") from None
    if not text:
        raise UsageError(f"{setting} = {path!r} is empty", code="secret_file")
    return text
