"""The look of the report page: one style sheet and one script, both inlined, in light and in dark."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --surface: #ffffff; --panel: #f6f7f9; --text: #1c2128; --muted: #5a6472; --line: #dfe3e8; --accent: #0065a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --surface: #14171c; --panel: #1c2027; --text: #e4e7eb; --muted: #9aa5b3; --line: #313843; --accent: #6db8ec;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--surface); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
header, main, footer { max-width: 1100px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 44px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 21px; line-height: 1.3; letter-spacing: -0.005em; margin: 0 0 6px; }
h3 { font-size: 16px; margin: 26px 0 6px; }
p { margin: 0 0 12px; max-width: 72ch; overflow-wrap: break-word; }
.summary { font-size: 18px; overflow-wrap: anywhere; }
.caption, .empty, footer { color: var(--muted); }
.empty { background: var(--panel); border-radius: 8px; padding: 14px 16px; }
section { padding: 34px 0 6px; margin-top: 22px; border-top: 1px solid var(--line); }
nav { margin: 20px 0 0; font-size: 14px; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0; padding: 0; }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus-visible { text-decoration: underline; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 24px 0 0; }
.tiles div { background: var(--panel); border-radius: 8px; padding: 14px 16px; }
.tiles dt { color: var(--muted); font-size: 14px; }
.tiles dd { margin: 2px 0 0; font-size: 27px; font-weight: 650; line-height: 1.25; letter-spacing: -0.01em; }
.tiles small { display: block; color: var(--muted); font-size: 14px; font-weight: 400; letter-spacing: 0; }
.facts { display: grid; grid-template-columns: minmax(110px, max-content) 1fr; gap: 6px 22px; margin: 12px 0; }
.facts dt { color: var(--muted); overflow-wrap: anywhere; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 12px 0 16px; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { text-align: left; vertical-align: top; padding: 9px 14px 9px 0; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 2px; }
.number + :not(.number) { padding-left: 14px; }
thead th { color: var(--muted); font-size: 13.5px; font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 130px; overflow-wrap: break-word; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead .number { white-space: normal; min-width: 84px; }
.long { min-width: 230px; overflow-wrap: anywhere; }
.word { white-space: nowrap; }
td small, th small { display: block; color: var(--muted); font-size: 13px; font-weight: 400; }
tr.chosen th { font-weight: 650; }
.unknown { color: var(--muted); font-style: italic; }
figure { margin: 14px 0 8px; }
.plot { width: 100%; min-height: 440px; }
figcaption { color: var(--muted); font-size: 14px; max-width: 80ch; }
.controls { display: grid; gap: 10px; background: var(--panel); border-radius: 8px; padding: 14px 16px; margin: 12px 0; }
.control { display: grid; gap: 4px 16px; grid-template-columns: minmax(120px, 190px) 1fr minmax(130px, 200px); }
.control { align-items: center; }
.control input, .control select { width: 100%; accent-color: var(--accent); font: inherit; }
.control select { grid-column: 2 / -1; color: var(--text); background: var(--surface); border: 1px solid var(--line); }
.control output { font-variant-numeric: tabular-nums; }
pre {
  background: var(--panel); border-radius: 8px; padding: 14px 16px; margin: 10px 0 16px; overflow-x: auto;
  font: 14px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
}
blockquote { margin: 12px 0 18px; padding: 2px 0 2px 16px; border-left: 3px solid var(--line); }
blockquote p { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
footer { padding-top: 30px; padding-bottom: 44px; font-size: 14px; }
@media (max-width: 560px) {
  header { padding-top: 26px; }
  header, main, footer { padding-left: 16px; padding-right: 16px; }
  h1 { font-size: 24px; }
  .summary { font-size: 16.5px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles dd { font-size: 22px; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: 9px; }
  .control { grid-template-columns: 1fr; }
  .control select { grid-column: 1; }
  .long { min-width: 165px; }
  tbody th { min-width: 100px; }
  th, td { padding-right: 10px; }
  thead .number { min-width: 76px; }
}
@media print {
  :root {
    --surface: #ffffff; --panel: #f6f7f9; --text: #1c2128; --muted: #5a6472; --line: #dfe3e8; --accent: #0065a3;
  }
  nav, .modebar { display: none !important; }
  .scroll { overflow: visible; }
  figure, tr, blockquote { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  @page { size: 325mm 459mm; margin: 10mm; }  /* of A4's shape, as wide as the page on a screen: printers scale it down */
}
"""

# Figures name the page's own colours ("@text", "@line" ...), so that one figure serves both colour schemes.
SCRIPT = """
(function () {
  "use strict";
  var all = JSON.parse(document.getElementById("figures").textContent);
  var ids = Object.keys(all);
  var moving = ids.filter(function (id) { return JSON.stringify(all[id]).indexOf('"choices":') >= 0; });
  var controls = Array.prototype.slice.call(document.querySelectorAll("[data-control]"));
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 560px)");
  var print = window.matchMedia("print");
  var waiting = false, FRAME_MS = 30;
  var config = {
    responsive: true, displaylogo: false, plotlyServerURL: "", showSendToCloud: false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]
  };
  function at(id) {
    var element = document.getElementById(id), style = getComputedStyle(document.documentElement), state = {};
    controls.forEach(function (control) { state[control.id] = Number(control.value); });
    return JSON.parse(element ? element.textContent : "{}", function (key, value) {
      if (value && value.choices) {
        return value.choices[state[value.by]];
      }
      return /color$/i.test(key) && typeof value === "string" && value.charAt(0) === "@"
        ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    });
  }
  function fit(layout, data) {
    var rows = data.some(function (trace) { return trace.orientation === "h"; });  // each bar needs its line
    layout.height = narrow.matches && layout.height > 400 && !rows ? 500 : layout.height;
    if (narrow.matches) {
      layout.dragmode = false;
      layout.font.size = 11;
      layout.margin.r = 8;
      layout.legend.font = {size: 11};
      if (data.every(function (trace) { return !trace.name || trace.showlegend === false || trace.name.length < 20; })) {
        layout.legend.entrywidthmode = "fraction";
        layout.legend.entrywidth = 0.48;
      }
    }
    return layout;
  }
  function say() {
    var words = at("words");
    Object.keys(words).forEach(function (id) {
      var place = document.getElementById(id);
      if (place.textContent !== words[id]) {
        place.textContent = words[id];
      }
    });
    controls.forEach(function (control) {
      var beside = document.getElementById(control.id + "-value");
      if (beside) {
        control.setAttribute("aria-valuetext", beside.textContent);
      }
    });
  }
  function draw(some) {
    var figures = at("figures");
    config.displayModeBar = narrow.matches ? false : "hover";
    some.forEach(function (id) {
      var place = document.getElementById(id);
      Plotly.react(place, figures[id].data, fit(figures[id].layout, figures[id].data), config);
    });
    document.documentElement.setAttribute("data-plots", String(ids.length));
  }
  function redraw() {
    draw(ids);
  }
  function move() {
    waiting = false;
    say();
    draw(moving);
  }
  [dark, narrow, print].forEach(function (media) { media.addEventListener("change", redraw); });
  controls.forEach(function (control) {
    control.addEventListener("input", function () {
      if (!waiting) {
        waiting = true;
        window.setTimeout(move, FRAME_MS);
      }
    });
  });
  say();
  redraw();
})();
"""
