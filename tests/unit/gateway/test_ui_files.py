"""The web view's files: everything lies there, nothing is fetched from elsewhere, nothing runs that isn't a file of ours."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from towline.gateway.ui_files import FOLDER, Files

TEXTS = {path.relative_to(FOLDER).as_posix(): path.read_text() for path in FOLDER.rglob("*") if path.is_file()}
SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc", "DOMParser")


def client(files: Files) -> httpx.AsyncClient:
    async def respond(request):
        return files.answer(request, request.path_params["name"])

    app = Starlette(routes=[Route("/{name:path}", respond)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".js")])
def test_text_never_becomes_markup_and_modules_are_there(name: str):
    for sink in SINKS:
        assert sink not in TEXTS[name], sink
    for imported in re.findall(r'from "([^"]+)"', TEXTS[name]):
        assert (FOLDER / name).parent.joinpath(imported).resolve().is_file(), imported


def test_nothing_comes_from_elsewhere():
    for name, text in TEXTS.items():
        addresses = set(re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s"'`)]*""", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert "@import" not in text, name
        assert "url(" not in text, name


def test_the_page_names_only_files_that_are_there_and_holds_no_script_or_style_of_its_own():
    page = TEXTS["index.html"]
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert name in TEXTS, name
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert "<style" not in page
    assert re.findall(r"\s(?:on\w+|style)=", page) == []


async def test_a_file_is_sent_once_and_then_known():
    async with client(Files()) as asked:
        first = await asked.get("/css/base.css")
        assert (first.status_code, first.headers["content-type"]) == (200, "text/css; charset=utf-8")
        again = await asked.get("/css/base.css", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        policy = first.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy.split("; "))
        assert first.headers["x-content-type-options"] == "nosniff"


async def test_nothing_outside_of_the_folder_is_sent(tmp_path: Path):
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "index.html").write_text("x")
    (tmp_path / "ui" / "notes.txt").write_text("not for the page")
    (tmp_path / "secret.html").write_text("s3cret")
    async with client(Files(tmp_path / "ui")) as asked:
        assert (await asked.get("/index.html")).status_code == 200
        for name in (
            "../secret.html",
            "%2e%2e/secret.html",
            "..%2fsecret.html",
            str(tmp_path / "secret.html"),
            "notes.txt",
            "none",
        ):
            response = await asked.get(f"/{name}")
            assert response.status_code == 404, name
            assert "s3cret" not in response.text
