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
      [layout.xaxis, layout.yaxis].forEach(function (axis) {  // a title in one line: what stands in brackets has no room
        axis.title.text = axis.title.text.replace(/ \([^)]*\)$/, "");
      });
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
