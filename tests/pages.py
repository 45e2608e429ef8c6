"""Pages as a browser would read them, and texts that no page may take for its own."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "&lt;b&gt;&amp;",
    "\u202egnp.exe",
    "lone \udcff surrogate",
    "line\nbreak\0nul",
    "ä日本語🙂" * 40,
    "",
]


class Page(HTMLParser):
    """Tags with their attributes, texts, and whether tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("style", "script") and data.strip():
            self.texts.append(data)

    def of(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [
            attrs for name, attrs in self.tags if name == tag and (not kind or kind in attrs.get("class", "").split())
        ]
