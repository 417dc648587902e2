"""The console's files, read once and served from memory, with headers that let a page do nothing but what this one does."""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

FOLDER: Final = Path(__file__).parent
INDEX: Final = "index.html"
LOGIN: Final = "login.html"
TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and not sent again while its tag is the same
}


class File(msgspec.Struct, frozen=True):
    """One file as it is sent."""

    content_type: str
    body: bytes
    tag: str

    @classmethod
    def read(cls, path: Path) -> "File":
        body = path.read_bytes()
        return cls(TYPES[path.suffix], body, f'"{blake2b(body, digest_size=12).hexdigest()}"')

    def answer(self, http: web.Request, status: int = 200) -> web.Response:
        """The file, or word that the asker has it."""
        headers = {**HEADERS, "Content-Type": self.content_type}
        if status != 200:
            return web.Response(body=self.body, status=status, headers={**headers, "Cache-Control": "no-store"})
        headers["ETag"] = self.tag
        if http.headers.get("If-None-Match") == self.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, headers=headers)


def all_files() -> dict[str, File]:
    """Every file of the console, by its path under /console/."""
    found = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): File.read(path) for path in found}
