// Draws charts in the page's own colours; draws them again when the colour scheme changes.
(function () {
  "use strict";
  let drawn = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(own) {
    const ink = colour("--ink"), line = colour("--line"), narrow = window.innerWidth < 640;
    const axis = (given) => Object.assign(
      { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, fixedrange: narrow }, given || {});
    return Object.assign({}, own, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, sans-serif", size: narrow ? 11 : 12 },
      margin: { l: 48, r: 12, t: 10, b: 40 }, height: own.height || (narrow ? 240 : 290),
      colorway: [0, 1, 2, 3, 4, 5, 6, 7].map((i) => colour("--c" + i)),
      xaxis: axis(own.xaxis), yaxis: axis(own.yaxis), hovermode: own.hovermode || "closest",
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 11 } },
      hoverlabel: { font: { color: ink }, bgcolor: colour("--raised"), bordercolor: line },
    });
  }

  window.eyasDraw = function (charts) {
    drawn = charts;
    const done = charts.map((chart) => {
      const place = document.getElementById("chart-" + chart.id);
      if (!place) { return null; }
      return Plotly.react(place, chart.traces, themed(chart.layout), { responsive: true, displayModeBar: false });
    });
    return Promise.all(done).then(() => { document.documentElement.dataset.drawn = String(charts.length); });
  };

  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", () => window.eyasDraw(drawn));
})();
