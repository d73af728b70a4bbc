// Draws the page of a simulated schedule.
const names = data.policies.map((policy) => policy.name);
const policyVariable = (name) => `--m${names.indexOf(name) % 8}`;
const lanes = [["forward", "computes"], ["backward", "computes"], ["push", "pushes"], ["pull", "pulls"]];
let worker = 0;
const longest = Math.max(...data.policies.map((policy) => policy.makespan));
let range = [0, Math.min(longest, (innerWidth > 700 ? 3 : 1.5) * data.step)];

function layerColours() {
  // Colours run from the first layer to the last, so that the order of the layers is visible.
  const parse = (name) => colour(name).match(/\w\w/g).map((hex) => parseInt(hex, 16));
  const stops = ["--m1", "--m4", "--m2"].map(parse);
  return data.layers.map((_, layer) => {
    const place = data.layers.length > 1 ? (2 * layer) / (data.layers.length - 1) : 0;
    const left = Math.min(1, Math.floor(place));
    return `rgb(${stops[left].map((from, i) => Math.round(from + (stops[left + 1][i] - from) * (place - left))).join(",")})`;
  });
}

function chart(policy, element, colours) {
  const pixels = element.clientWidth / (range[1] - range[0]);
  const traces = lanes.map(([lane, row]) => {
    const bars = policy.bars[worker][lane];
    const doing = lane === "push" || lane === "pull" ? `${lane} of` : lane;
    return {
      type: "bar", orientation: "h", y: bars.start.map(() => row), base: bars.start, x: bars.ms, width: 0.72, opacity: lane === "forward" ? 0.6 : 1,
      marker: { color: bars.layer.map((layer) => colours[layer]), line: { width: 0.5, color: colour("--card") } },
      text: bars.layer.map((layer, i) => (bars.ms[i] * pixels > 5 + 8 * `${layer}`.length ? `${layer}` : "")), // only if it fits
      textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none", insidetextfont: { color: colour("--back"), size: 11 },
      customdata: bars.layer.map((layer, i) => [data.layers[layer], bars.step[i], bars.start[i] + bars.ms[i], bars.slices[i] > 1 ? `, ${bars.slices[i]} slices` : ""]),
      hovertemplate: `${doing} layer %{customdata[0]}, step %{customdata[1]}%{customdata[3]}<br>%{base:.5~g} to %{customdata[2]:.5~g} ms<extra></extra>`,
    };
  });
  const ends = policy.makespan <= range[1] * 1.001;
  draw(element, traces, {
    barmode: "overlay", dragmode: "zoom",
    xaxis: axis("milliseconds", { range: [...range], fixedrange: false }),
    yaxis: axis("", { type: "category", categoryarray: ["pulls", "pushes", "computes"], range: [-0.5, 2.5], showgrid: false, tickfont: { size: 12, color: colour("--ink") } }),
    shapes: ends ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: policy.makespan, x1: policy.makespan, line: { color: colour("--quiet"), width: 1, dash: "dot" } }] : [],
  });
}

function charts() {
  const place = document.getElementById("policies");
  const colours = layerColours();
  for (const [index, policy] of data.policies.entries()) {
    let figure = place.children[index];
    const made = !figure;
    if (made) {
      figure = document.createElement("figure");
      figure.append(document.createElement("figcaption"), Object.assign(document.createElement("div"), { className: "plot" }));
      figure.firstChild.append(policy.name, Object.assign(document.createElement("small"), { textContent: `${number(policy.makespan)} ms in all` }));
      place.append(figure);
    }
    chart(policy, figure.lastChild, colours);
    if (made) figure.lastChild.on("plotly_relayout", zoomed);
  }
}

function zoomed(change) {
  // All policies show the same range of time: zooming one zooms all, and a double click shows everything.
  const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (from === undefined && !change["xaxis.autorange"]) return;
  range = from === undefined ? [0, longest] : [Math.max(0, from), to];
  charts();
}

function waiting() {
  const traces = data.policies.map((policy) => ({
    type: "bar", x: data.layers, y: policy.waiting, name: policy.name, marker: { color: colour(policyVariable(policy.name)) },
    hovertemplate: `${policy.name}: %{y:.3~g} ms for layer %{x}<extra></extra>`,
  }));
  draw("waiting", traces, { barmode: "group", bargap: 0.3, xaxis: axis("layer", { type: "category", showgrid: false }), yaxis: axis("milliseconds per step", { rangemode: "tozero" }) });
}

function paint() {
  charts();
  waiting();
  document.documentElement.dataset.drawn = document.querySelectorAll(".main-svg").length;
}

function choose(number) {
  worker = number;
  for (const button of document.querySelectorAll(".splits button")) button.setAttribute("aria-pressed", button.textContent === `${number}`);
  charts();
}

function prepare() {
  for (const cell of document.querySelectorAll("tbody th[data-method]")) cell.style.setProperty("--dot", `var(${policyVariable(cell.dataset.method)})`);
  legend("policy-names", names, policyVariable);
  const ramp = document.getElementById("ramp");
  const first = document.createElement("span");
  first.append(`layer ${data.layers[0]}`, Object.assign(document.createElement("i"), { className: "ramp" }), `layer ${data.layers.at(-1)}`);
  ramp.append(first, Object.assign(document.createElement("span"), { className: "quiet", textContent: "forward passes are pale" }));
  if (data.workers > 1) {
    for (let number = 0; number < Math.min(data.workers, 16); number += 1) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: `${number}`, title: `worker ${number}`, onclick: () => choose(number) });
      button.setAttribute("aria-pressed", number === 0);
      document.querySelector(".splits").append(button);
    }
  }
  const part = data.steps < data.iterations ? ` Of ${data.iterations} steps the first ${data.steps} are drawn.` : "";
  const who = data.workers > 1 ? "One worker at a time, chosen by its number" : "The worker";
  document.getElementById("chart-note").textContent = `${who}; numbers are layers. Drag over a chart to see a part of the time, click twice to see all of it.${part}`;
}

prepare();
paint();
keepPainted(paint);
