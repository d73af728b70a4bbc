// Draws predictions over the number of workers, and measured steps on the curves of emulated hosts.
const exchanges = Object.keys(data.curves);
const measured = [...new Set(data.lab.flatMap((one) => Object.keys(one.curves)))];
const all = [...new Set([...exchanges, ...measured])].filter((name) => name !== "none");
const variable = (name) => (name === "none" ? "--m0" : `--m${1 + (all.indexOf(name) % 7)}`);
const label = (name) => (name === "none" ? "no exchange" : name);
const milliseconds = { type: "log", tickvals: [0.1, 1, 10, 1e2, 1e3, 1e4, 1e5, 1e6], ticktext: ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s", "1000 s"] };
const counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
const overWorkers = (shown) => axis("workers", { type: "log", range: [Math.log10(shown[0]) - 0.02, Math.log10(shown.at(-1)) + 0.02], tickvals: counts.filter((n) => n <= shown.at(-1)), ticktext: counts.map((n) => n.toLocaleString("en")), tickangle: 0, showgrid: false });

function lines(id, key, unit, yaxis) {
  const traces = exchanges.map((name) => ({
    x: data.workers, y: data.curves[name][key].map((value) => value || null), type: "scatter", mode: "lines", name, line: { color: colour(variable(name)), width: 2 },
    hovertemplate: `${name}, %{x:,} workers<br>%{y:.3g} ${unit}<extra></extra>`,
  }));
  draw(id, traces, { xaxis: overWorkers(data.workers), yaxis });
}

function labFigures() {
  const place = document.getElementById("lab-figures");
  // All figures are created before the first is drawn, because the number of figures decides their width.
  for (const one of data.lab.slice(place.children.length)) {
    const figure = document.createElement("figure");
    figure.append(Object.assign(document.createElement("figcaption"), { textContent: one.rate }), Object.assign(document.createElement("div"), { className: "plot" }));
    place.append(figure);
  }
  for (const [index, one] of data.lab.entries()) {
    const figure = place.children[index];
    const traces = Object.entries(one.curves).map(([name, ms]) => ({
      x: one.workers, y: ms, type: "scatter", mode: "lines", line: { color: colour(variable(name)), width: 1.8 }, hoverinfo: "skip",
    }));
    for (const name of Object.keys(one.curves)) {
      const points = one.points.filter((point) => point.exchange === name);
      traces.push({
        x: points.map((point) => point.workers), y: points.map((point) => point.measured_ms), type: "scatter", mode: "markers",
        marker: { color: colour(variable(name)), size: 9, line: { color: colour("--card"), width: 1.5 } },
        hovertemplate: `${label(name)}, %{x} hosts<br>%{y:.3g} ms measured<extra></extra>`,
      });
    }
    draw(figure.lastChild, traces, { xaxis: overWorkers(one.workers), yaxis: axis("time of a step", milliseconds) });
  }
}

function checks() {
  const rows = data.lab.flatMap((one) => one.points).map((point) => {
    const row = document.createElement("tr");
    const head = Object.assign(document.createElement("th"), { scope: "row", textContent: label(point.exchange) });
    head.style.setProperty("--dot", `var(${variable(point.exchange)})`);
    const off = `${point.off < 0 ? "−" : "+"}${Math.abs(100 * point.off).toFixed(0)} %`;
    const cells = [["Hosts", point.workers], ["Rate", point.rate], ["Predicted", `${number(point.predicted_ms)} ms`], ["Measured", `${number(point.measured_ms)} ms`], ["Off", off]];
    row.append(head, ...cells.map(([name, text]) => {
      const cell = Object.assign(document.createElement("td"), { textContent: text });
      cell.dataset.label = name;
      return cell;
    }));
    return row;
  });
  document.getElementById("checks").replaceChildren(...rows);
}

function paint() {
  lines("step-time", "ms", "ms", axis("time of a step", milliseconds));
  lines("volume", "mb", "MB", axis("megabytes", { type: "log", exponentformat: "none", dtick: 1 }));
  lines("efficiency", "efficiency", "%", axis("%", { range: [0, 103] }));
  labFigures();
  document.documentElement.dataset.drawn = document.querySelectorAll(".main-svg").length;
}

for (const cell of document.querySelectorAll("tbody th[data-method]")) cell.style.setProperty("--dot", `var(${variable(cell.dataset.method)})`);
legend("exchanges", exchanges, variable);
if (data.lab.length) {
  document.getElementById("lab-section").hidden = false;
  const shared = data.cores ? `Curves: the same model with all hosts on ${data.cores} shared cores. ` : "";
  document.getElementById("lab-note").textContent = `${shared}Dots: measured steps.`;
  legend("lab-exchanges", measured.map(label), (name) => variable(name === "no exchange" ? "none" : name));
  checks();
}
paint();
keepPainted(paint);
