// Draws step time over bandwidth.
const methods = Object.keys(data.curves);
const others = methods.filter((method) => method !== "dense");
const variable = (method) => (method === "dense" ? "--m0" : `--m${1 + (others.indexOf(method) % 7)}`);
const bits = (rate) => (rate >= 1e9 ? `${+(rate / 1e9).toPrecision(2)} Gbit/s` : `${+(rate / 1e6).toPrecision(2)} Mbit/s`);

function value(method, rate) {
  const place = Math.min(data.rates.findIndex((r) => r >= rate), data.rates.length - 1);
  if (place <= 0) return data.curves[method][0];
  const [x0, x1] = [Math.log(data.rates[place - 1]), Math.log(data.rates[place])];
  const [y0, y1] = [Math.log(data.curves[method][place - 1]), Math.log(data.curves[method][place])];
  return Math.exp(y0 + ((y1 - y0) * (Math.log(rate) - x0)) / (x1 - x0));
}

function paint() {
  const traces = methods.map((method) => ({
    x: data.rates, y: data.curves[method], type: "scatter", mode: "lines", name: method,
    line: { color: colour(variable(method)), width: method === data.best ? 3.2 : 1.8 },
    text: data.rates.map(bits), hovertemplate: `${method}, %{text}<br>%{y:.3g} ms<extra></extra>`,
  }));
  for (const [method, rate] of Object.entries(data.crossings)) {
    if (rate === null || rate <= data.rates[0]) continue;
    traces.push({
      x: [rate], y: [value(method, rate)], type: "scatter", mode: "markers", hovertemplate: `${method} up to ${bits(rate)}<extra></extra>`,
      marker: { color: colour(variable(method)), size: 9, line: { color: colour("--card"), width: 1.5 } },
    });
  }
  const layout = {
    xaxis: axis("bandwidth of a worker's link", { type: "log", tickvals: [1e6, 1e7, 1e8, 1e9, 1e10, 1e11], ticktext: ["1 Mbit/s", "10", "100", "1 Gbit/s", "10", "100"], tickangle: 0, showgrid: false }),
    yaxis: axis("time of a step", { type: "log", tickvals: [0.1, 1, 10, 1e2, 1e3, 1e4, 1e5, 1e6], ticktext: ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s", "1000 s"] }),
    shapes: [{ type: "line", x0: data.rate, x1: data.rate, yref: "paper", y0: 0, y1: 1, line: { color: colour("--quiet"), width: 1, dash: "dot" } }],
    annotations: [{
      x: Math.log10(data.rate), yref: "paper", y: 1, xanchor: data.rate > 3e9 ? "right" : "left", yanchor: "top", showarrow: false,
      text: ` ${data.here} `, font: { size: 11, color: colour("--quiet") },
    }],
  };
  draw("over-rates", traces, layout);
  document.documentElement.dataset.drawn = document.querySelectorAll(".main-svg").length;
}

for (const cell of document.querySelectorAll("tbody th[data-method]")) {
  if (methods.includes(cell.dataset.method)) cell.style.setProperty("--dot", `var(${variable(cell.dataset.method)})`);
}
legend("methods", methods, variable);
paint();
keepPainted(paint);
