"""What a page links to and loads."""

from html.parser import HTMLParser


class Links(HTMLParser):
    """Collects the targets of links, the ids, and what the page loads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            found = {"href": self.targets, "id": self.ids, "src": self.loaded}.get(name)
            if found is not None:
                found.append(str(value))


def assert_whole(page: str) -> None:
    """Check that a page's contents lead somewhere, and that it loads nothing from elsewhere."""
    links = Links(page)
    assert len(links.targets) >= 2
    assert {target.removeprefix("#") for target in links.targets} <= set(links.ids)
    assert len(links.ids) == len(set(links.ids))
    assert all(source.startswith("data:") for source in links.loaded)
