// Draws the report of training runs.
// dense is grey; the other methods get their colours in order, the same in every figure.
const others = data.methods.filter((method) => method !== "dense");
const methodVariable = (method) => (method === "dense" ? "--m0" : `--m${1 + (others.indexOf(method) % 7)}`);
const methodColour = (method) => colour(methodVariable(method));
// There are seven colours: the eighth method has the first one's colour, with dashes and a hollow mark.
const methodRound = (method) => Math.floor(Math.max(0, others.indexOf(method)) / 7);
const methodDash = (method) => ["solid", "dash", "dot", "dashdot"][methodRound(method) % 4];
const splits = ["test", "train"].filter((split) => data.curves.some((curve) => curve.split === split));
let split = splits[0];

// Of a loss, which never comes near 0, an axis from 0 would show little.
function valueRange() {
  if (data.percent) return { rangemode: "tozero", range: [0, 108], tickvals: [0, 20, 40, 60, 80, 100] };
  return data.higher_is_better ? { rangemode: "tozero" } : {};
}

function curves(id, key, title, unit) {
  const shown = data.curves.filter((curve) => curve.split === split);
  const runs = (method) => shown.filter((curve) => curve.method === method).length;
  const traces = shown.map((curve) => ({
    x: curve[key], y: curve.value, name: curve.method, type: "scatter", mode: curve.value.length > 1 ? "lines" : "markers",
    line: { color: methodColour(curve.method), dash: methodDash(curve.method), width: runs(curve.method) > 1 ? 1.2 : 2.2 },
    hovertemplate: `${curve.method}, seed ${curve.seed}<br>%{x:.4g} ${unit}: %{y:.${data.decimals}f}<extra></extra>`,
  }));
  for (const curve of shown.filter((curve) => curve.met !== null)) {
    traces.push({
      x: [curve[key][curve.met]], y: [curve.value[curve.met]], type: "scatter", mode: "markers", hoverinfo: "skip",
      marker: { color: methodColour(curve.method), size: 8, line: { color: colour("--card"), width: 1.5 } },
    });
  }
  const layout = {
    xaxis: axis(title, { rangemode: "tozero", showgrid: false }),
    yaxis: axis(`${split} ${data.metric}${data.higher_is_better ? "" : " (lower is better)"}`, valueRange()),
    shapes: [], annotations: [],
  };
  if (data.target !== null && split === "test") {
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.target, y1: data.target, line: { color: colour("--quiet"), width: 1, dash: "dot" } });
    layout.annotations.push({
      xref: "paper", x: 0.01, y: data.target, xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 11, color: colour("--quiet") },
      text: `target ${+data.target.toFixed(data.decimals)}${data.percent ? " %" : ""}`,
    });
  }
  draw(id, traces, layout);
}

function bars(methods) {
  // The first method is at the top, as in the table.
  return { yaxis: axis("", { automargin: true, autorange: "reversed", showgrid: false, tickfont: { size: 13, color: colour("--ink") }, type: "category", categoryarray: methods }), bargap: 0.4 };
}

function phaseTimes() {
  const { methods, series } = data.phases;
  const total = methods.map((_, place) => series.reduce((sum, one) => sum + one.ms[place], 0));
  const traces = series.map((one) => ({
    type: "bar", orientation: "h", y: methods, x: one.ms, marker: { color: colour(`--${one.phase}`) },
    hovertemplate: `${one.phase}: %{x:.3g} ms<extra></extra>`,
  }));
  const annotations = methods.map((method, place) => ({
    x: total[place], y: method, text: ` ${number(total[place])} ms`, showarrow: false, xanchor: "left", font: { size: 13 },
  }));
  const room = [0, Math.max(...total, 1e-9) * 1.3];
  draw("phase-times", methods.length ? traces : [], { ...bars(methods), barmode: "stack", annotations, xaxis: axis("milliseconds per step", { range: room }) });
}

function bytesSent() {
  const { methods, mb } = data.bytes;
  const traces = [{
    type: "bar", orientation: "h", y: methods, x: mb, marker: { color: methods.map(methodColour) }, hovertemplate: "%{x:.4g} MB<extra></extra>",
  }];
  const text = (value) => (value >= 0.1 ? `${number(value)} MB` : `${number(value * 1000)} kB`);
  const annotations = methods.map((method, place) => ({
    x: mb[place], y: method, text: ` ${text(mb[place])}`, showarrow: false, xanchor: "left", font: { size: 13 },
  }));
  const room = [0, Math.max(...mb, 1e-9) * 1.25];
  draw("bytes", methods.length ? traces : [], { ...bars(methods), annotations, xaxis: axis("megabytes per worker and step", { range: room }) });
}

// Returns the index-th figure of a grid, and creates it at the first call.
function figureIn(place, index, caption, note) {
  let figure = place.children[index];
  if (!figure) {
    figure = document.createElement("figure");
    figure.append(document.createElement("figcaption"), Object.assign(document.createElement("div"), { className: "plot" }));
    figure.firstChild.append(caption, Object.assign(document.createElement("small"), { textContent: note }));
    place.append(figure);
  }
  return figure;
}

const diagnosed = [
  ["delta", "Contraction δ", "share of the squared norm that is sent", { range: [0, 1.05] }],
  ["cosine", "Cosine", "of the applied and the dense mean", { range: [-1.05, 1.05] }],
  ["xi", "Alistarh's ξ", "distance to the selection of the mean", { rangemode: "tozero" }],
  ["residual_ratio", "Residual / gradient", "norms", { rangemode: "tozero" }],
  ["age", "Age of the residual", "steps, on average", { rangemode: "tozero" }],
  ["waited", "Age of the entries sent", "steps, on average", { rangemode: "tozero" }],
];

function diagnoses() {
  const place = document.getElementById("diagnosed");
  for (const [index, [key, caption, note, range]] of diagnosed.entries()) {
    const figure = figureIn(place, index, caption, note);
    const traces = data.diagnoses.map((run) => ({
      x: run.step, y: run[key], type: "scatter", mode: run.step.length > 1 ? "lines" : "markers", line: { color: methodColour(run.method), dash: methodDash(run.method), width: 1.8 },
      marker: { color: methodColour(run.method) }, hovertemplate: `${run.method}, seed ${run.seed}<br>step %{x}: %{y:.3g}<extra></extra>`,
    }));
    draw(figure.lastChild, traces, { xaxis: axis("step", { showgrid: false, nticks: 5 }), yaxis: axis("", { nticks: 5, ...range }) });
  }
}

function layers() {
  const place = document.getElementById("layers");
  for (const [index, layer] of data.layers.shown.entries()) {
    const figure = figureIn(place, index, layer.layer, `${layer.entries.toLocaleString("en")} entries`);
    const traces = layer.series.map((one) => ({
      x: one.x, y: one.share, type: "scatter", mode: "lines",
      line: { color: methodColour(one.method), dash: methodDash(one.method), width: 1.8, shape: "hvh" },
      fill: layer.series.length === 1 ? "tozeroy" : "none", hovertemplate: `${one.method}<br>|g| ≈ %{x:.1e}: %{y:.2f} %<extra></extra>`,
    }));
    const decades = data.layers.range;
    draw(figure.lastChild, traces, {
      xaxis: axis("|gradient|", { type: "log", range: decades, dtick: Math.ceil((decades[1] - decades[0]) / 3), tickangle: 0, exponentformat: "power", showgrid: false }),
      yaxis: axis("% of entries", { rangemode: "tozero", nticks: 4 }),
    });
  }
}

const lossVariable = (way) => `--m${data.loss.findIndex((one) => one.transport === way) % 8}`;

function overLoss(id, key, title, range) {
  // Losses have equal distances, because most of them are small and one is large.
  const shares = [...new Set(data.loss.flatMap((one) => one.loss))].sort((a, b) => a - b).map((share) => `${share} %`);
  const traces = data.loss.map((one) => ({
    x: one.loss.map((share) => `${share} %`), y: one[key], type: "scatter", mode: "lines+markers",
    line: { color: colour(lossVariable(one.transport)), width: 2.2 }, marker: { size: 8 },
    hovertemplate: `${one.transport} at %{x} loss: %{y:.4g}<extra></extra>`,
  }));
  draw(id, traces, {
    xaxis: axis("packets lost on every link", { type: "category", categoryarray: shares, showgrid: false }),
    yaxis: axis(title, range),
  });
}

function loss() {
  if (!data.loss.length) return;
  overLoss("loss-waits", "wait", "milliseconds per step", { rangemode: "tozero" });
  // The axis is wider than the noise of a test split, so that a tenth of a point does not look large.
  const low = Math.min(...data.loss.flatMap((one) => one.value.filter((value) => value !== null)));
  overLoss("loss-values", "value", `test ${data.metric}`, data.percent ? { range: [Math.max(0, low - 5), 101] } : {});
}

function paint() {
  curves("over-time", "wall", "seconds of training", "s");
  curves("over-passes", "epoch", "passes of the data", "passes");
  phaseTimes();
  bytesSent();
  loss();
  if (data.diagnoses.length) diagnoses();
  layers();
  document.documentElement.dataset.drawn = document.querySelectorAll(".main-svg").length;
}

function choose(name) {
  split = name;
  for (const button of document.querySelectorAll(".splits button")) button.setAttribute("aria-pressed", button.textContent === name);
  paint();
}

function methodLegend(id, methods) {
  legend(id, methods, methodVariable);
  for (const entry of document.getElementById(id).children) entry.dataset.round = methodRound(entry.textContent);
}

function prepare() {
  for (const cell of document.querySelectorAll("tbody th[data-method]")) {
    const method = data.methods.find((name) => cell.dataset.method === name || cell.dataset.method.startsWith(`${name} (`));
    if (!method) continue;
    cell.style.setProperty("--dot", `var(${methodVariable(method)})`);
    cell.dataset.round = methodRound(method);
  }
  methodLegend("methods", data.methods);
  legend("phases", data.phases.series.map((one) => one.phase), (phase) => `--${phase}`);
  if (splits.length > 1) {
    for (const name of splits) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: name, onclick: () => choose(name) });
      document.querySelector(".splits").append(button);
    }
  }
  if (data.loss.length) {
    document.getElementById("loss-section").hidden = false;
    legend("loss-ways", data.loss.map((one) => one.transport), lossVariable);
  }
  if (data.diagnoses.length) {
    document.getElementById("diagnosis-section").hidden = false;
    methodLegend("diagnosed-methods", [...new Set(data.diagnoses.map((run) => run.method))]);
  }
  if (data.layers.shown.length) {
    document.getElementById("gradient-section").hidden = false;
    const xs = data.layers.shown.flatMap((layer) => layer.series.flatMap((one) => one.x));
    data.layers.range = [Math.floor(Math.log10(Math.min(...xs))), Math.ceil(Math.log10(Math.max(...xs)))];
    const steps = Math.max(...data.layers.shown.map((layer) => layer.step));
    const rest = data.layers.left_out ? ` The ${data.layers.left_out} smallest layers are left out; the logs have them.` : "";
    document.getElementById("gradient-note").textContent = `The last histogram of each run (step ${steps}): how many entries of a layer's gradient are how large.${rest}`;
    methodLegend("gradient-methods", [...new Set(data.layers.shown.flatMap((layer) => layer.series.map((one) => one.method)))]);
  }
  choose(split);
}

prepare();
keepPainted(paint);
