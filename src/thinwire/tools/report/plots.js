"use strict";
// Shared by all pages: data, colours, axes and legends. Figures are drawn again when the colour scheme changes or for print.
const data = JSON.parse(document.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(title, extra) {
  return {
    title: { text: title, font: { size: 12, color: colour("--quiet") }, standoff: 8 }, automargin: true, fixedrange: true,
    gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, tickfont: { size: 12, color: colour("--quiet") }, ...extra,
  };
}

function draw(id, traces, layout) {
  const element = typeof id === "string" ? document.getElementById(id) : id;
  if (!traces.length) {
    element.classList.add("empty");
    element.textContent = "nothing was recorded";
    return;
  }
  const base = {
    width: element.clientWidth, height: element.clientHeight,
    margin: { l: 8, r: 12, t: 10, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink"), size: 13 },
    hoverlabel: { bgcolor: colour("--back"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
  };
  Plotly.react(element, traces, { ...base, ...layout }, { responsive: true, displayModeBar: false });
}

function number(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toPrecision(2);
}

function legend(id, names, variable) {
  document.getElementById(id).replaceChildren(...names.map((name) => {
    const entry = Object.assign(document.createElement("span"), { textContent: name });
    entry.dataset.colour = "";
    entry.style.setProperty("--dot", `var(${variable(name)})`);
    return entry;
  }));
}

function keepPainted(paint) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  const printing = (on) => { document.documentElement.classList.toggle("printing", on); paint(); };
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
}

