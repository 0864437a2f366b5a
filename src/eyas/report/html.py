"""The report as one HTML file that opens offline: styles, data and plotly's script are inside."""

from __future__ import annotations

from html import escape

from eyas.report.charts import charts
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
    return whole_page(f"{project_name(view)}: eyas report", body(view), chart_data(charts(view)))


def whole_page(title: str, content: str, drawn: str) -> str:
    """A page that needs nothing else.

    Args:
        content: what stands in its body.
        drawn: charts as `chart_data` gives them.
    """
    return _PAGE.format(
        title=escape(title),
        style=asset("page.css"),
        body=content,
        plotly=plotly_script().replace("</script", "<\\/script"),
        charts=drawn,
        script=asset("page.js"),
    )
