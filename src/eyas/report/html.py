"""The report as one HTML file that opens offline: styles, data and plotly's script are inside."""

from __future__ import annotations

from html import escape

from eyas.report.overview import Overview
from eyas.report.page import asset, body, chart_data
from eyas.report.plotly_script import plotly_script
from eyas.report.sections import project_name

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{plotly}</script>
<script type="application/json" id="charts">{charts}</script>
<script>{script}</script>
<script>eyasDraw(JSON.parse(document.getElementById("charts").textContent));</script>
</body>
</html>
"""


def html(view: Overview) -> str:
    """The whole file, about 5 MB of which are plotly's."""
    return _PAGE.format(
        title=escape(f"{project_name(view)}: eyas report"),
        style=asset("page.css"),
        body=body(view),
        plotly=plotly_script().replace("</script", "<\\/script"),
        charts=chart_data(view),
        script=asset("page.js"),
    )
