"""The page works in a closed network."""

from __future__ import annotations

from xinference_xavier.serving.ui.routes import page


def test_the_page_loads_nothing_from_elsewhere() -> None:
    """It is a single document."""
    text = page()
    assert "/*" + "script*/" not in text
    for outside in (" src=", "@import", "url(http", 'href="http', "import ", "//cdn"):
        assert outside not in text, outside
