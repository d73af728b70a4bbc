// Draws the figures of a reproduced paper; a method has the same colour in all of them.
const names = [...new Set(data.figures.flatMap((figure) => figure.series.map((series) => series.name)))];
const others = names.filter((name) => name !== "dense");
const variable = (name) => (name === "dense" ? "--m0" : `--m${1 + (others.indexOf(name) % 7)}`);

data.figures.forEach((figure, place) => {
  const element = document.createElement("figure");
  const caption = Object.assign(document.createElement("figcaption"), { textContent: figure.title });
  if (figure.note) caption.append(Object.assign(document.createElement("small"), { textContent: figure.note }));
  const keys = Object.assign(document.createElement("div"), { className: "legend", id: `legend-${place}` });
  const plot = Object.assign(document.createElement("div"), { className: "plot", id: `plot-${place}` });
  element.append(caption, keys, plot);
  document.getElementById("figures").append(element);
  const shown = [...new Set(figure.series.map((series) => series.name))];
  legend(keys.id, shown.length > 1 || figure.kind !== "bars" ? shown : [], variable);
});

function trace(figure, series) {
  const tone = colour(variable(series.name));
  const hover = `${series.name}<br>%{x}, %{y:.4g}<extra></extra>`;
  if (figure.kind === "bars") return { x: series.x, y: series.y, type: "bar", name: series.name, marker: { color: tone }, hovertemplate: hover };
  const mode = figure.kind === "points" ? "markers" : series.x.length < 12 ? "lines+markers" : "lines";
  return {
    x: series.x, y: series.y, type: "scatter", mode, name: series.name, hovertemplate: hover,
    line: { color: tone, width: 2, dash: ["solid", "dash", "dot"][Math.max(0, Math.floor(others.indexOf(series.name) / 7)) % 3] }, marker: { color: tone, size: 6 },
  };
}

function paint() {
  data.figures.forEach((figure, place) => {
    const logarithmic = (letter) => (figure.log.includes(letter) ? { type: "log", exponentformat: "power", dtick: 1 } : {});
    const wide = (letter) => (figure.log.includes(letter) && spans(figure, letter) < 1.2 ? { dtick: null, nticks: 5 } : {});
    const names = figure.kind === "bars" ? { type: "category" } : {};
    draw(`plot-${place}`, figure.series.map((series) => trace(figure, series)), {
      xaxis: axis(figure.x, { ...logarithmic("x"), ...wide("x"), ...names, showgrid: false }),
      yaxis: axis(figure.y, { ...logarithmic("y"), ...wide("y") }),
      barmode: "group",
    });
  });
  document.documentElement.dataset.drawn = document.querySelectorAll(".main-svg").length;
  document.documentElement.dataset.height = Math.ceil(document.documentElement.getBoundingClientRect().height);
}

// Returns how many powers of ten an axis covers.
function spans(figure, letter) {
  const values = figure.series.flatMap((series) => series[letter]).filter((v) => v > 0);
  return Math.log10(Math.max(...values) / Math.min(...values));
}

for (const cell of document.querySelectorAll("tbody th[data-method]")) {
  if (!names.includes(cell.dataset.method)) continue;
  cell.dataset.coloured = "";
  cell.style.setProperty("--dot", `var(${variable(cell.dataset.method)})`);
}
paint();
keepPainted(paint);
