const SVG = "http://www.w3.org/2000/svg";
const MARKERS = [
  "M-4,0A4,4 0 1 0 4,0A4,4 0 1 0 -4,0Z", "M-4,-4H4V4H-4Z", "M0,-5L5,4H-5Z", "M0,-5.5L5.5,0L0,5.5L-5.5,0Z",
  "M0,5L5,-4H-5Z", "M-1.5,-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",
  "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
];

function draw(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** About four round steps from 0 to at least `top`. */
function ticks(top) {
  if (!(top > 0)) return [0, 1];
  const rough = top / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, i) => i * step);
}

/**
 * A chart of lines with a legend, drawn again when its width changes.
 * series: [{ policy, points: [{ x, y, low, high }] }], x an index into `labels`. A policy that keeps everything is dashed.
 */
function lineChart(title, labels, series, format, most, xLabel) {
  const holder = make("div", { class: "plot" }), legend = make("ul", { class: "legend" });
  for (const { policy } of series) {
    const number = DATA.policies.indexOf(policy) % 7;
    const icon = draw("svg", { viewBox: "-7 -7 14 14", class: `c${number}`, "aria-hidden": "true" },
      draw("path", { d: MARKERS[number], fill: `var(--c${number})` }));
    legend.append(make("li", {}, icon, policy));
  }
  const figure = make("figure", { "data-chart": title }, make("figcaption", {}, title), holder, legend,
    numbers(title, labels, series, format, xLabel));
  const top = most ?? Math.max(0, ...series.flatMap((s) => s.points.map((p) => p.high ?? p.y)));
  const render = () =>
    holder.replaceChildren(plot(title, labels, series, format, ticks(top), xLabel, holder.clientWidth || 320));
  new ResizeObserver(render).observe(holder);
  return figure;
}

function plot(title, labels, series, format, steps, xLabel, width) {
  const height = 230, left = 14 + 7 * Math.max(...steps.map((s) => format(s).length)), right = 14, bottom = 44, head = 10;
  const last = steps.at(-1);
  const x = (i) => left + (width - left - right) * (labels.length > 1 ? (i + .25) / (labels.length - .5) : .5);
  const y = (v) => height - bottom - (height - bottom - head) * (v / last);
  const spoken = `${title}. The numbers are in the table below the chart.`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spoken });
  for (const step of steps)
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(step), y2: y(step) }),
      draw("text", { x: left - 6, y: y(step) + 4, "text-anchor": "end" }, format(step)));
  labels.forEach((label, i) => svg.append(draw("text", { x: x(i), y: height - bottom + 18, "text-anchor": "middle" }, label)));
  svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  series.forEach(({ policy, points }, s) => {
    const number = DATA.policies.indexOf(policy) % 7, shift = 4 * (s - (series.length - 1) / 2);
    const group = draw("g", { class: `c${number}` });
    const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.x) + shift},${y(p.y)}`).join("");
    group.append(draw("path", { class: policy === "full" ? "series dashed" : "series", d: path }));
    for (const p of points) {
      const px = x(p.x) + shift;
      if (p.low !== undefined) group.append(draw("line", { class: "bar-line", x1: px, x2: px, y1: y(p.low), y2: y(p.high) }));
      group.append(draw("path", { class: "point", d: MARKERS[number], transform: `translate(${px},${y(p.y)})` },
        draw("title", {}, `${policy}, ${labels[p.x]}: ${format(p.y)}`)));
    }
    svg.append(group);
  });
  return svg;
}

function numbers(title, labels, series, format, xLabel) {
  const head = make("tr", {}, make("th", { scope: "col" }, "Policy"), ...labels.map((l) => make("th", { scope: "col", class: "num" }, l)));
  const rows = series.map(({ policy, points }) => make("tr", {}, make("th", { scope: "row" }, policy),
    ...labels.map((_, i) => {
      const point = points.find((p) => p.x === i);
      return make("td", { class: "num" }, point ? format(point.y) : "");
    })));
  const table = make("table", {}, make("caption", { class: "visually-hidden" }, `${title}, by ${xLabel}`), make("thead", {}, head), make("tbody", {}, ...rows));
  const scroll = make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `${title}, numbers` }, table);
  return make("details", {}, make("summary", {}, "Numbers"), scroll);
}

const unique = (values) => [...new Set(values)];
const budgets = (rows) => unique(rows.map((r) => r.budget)).sort((a, b) => (a > 1) - (b > 1) || a - b);
const labelOf = (budget) => DATA.results.find((r) => r.budget === budget).budget_label;

/** One line per policy of the rows; several rows at one place are averaged. */
function lines(rows, places, placeOf, valueOf, withBars) {
  return DATA.policies.map((policy) => {
    const points = places.map((place, x) => {
      const here = rows.filter((r) => r.policy === policy && placeOf(r) === place && valueOf(r) !== null);
      if (!here.length) return null;
      const y = here.reduce((sum, r) => sum + valueOf(r), 0) / here.length;
      return withBars ? { x, y, low: here[0].score_low, high: here[0].score_high } : { x, y };
    }).filter(Boolean);
    return { policy, points };
  }).filter((s) => s.points.length);
}

function startScores() {
  for (const task of unique(DATA.results.map((r) => r.task))) {
    const rows = DATA.results.filter((r) => r.task === task), places = budgets(rows);
    const ppl = rows.every((r) => r.ppl_ratio !== null);
    const series = lines(rows, places, (r) => r.budget, (r) => (ppl ? r.ppl_ratio : r.score), !ppl);
    const title = ppl ? `${task}: perplexity over the full cache's (n = ${rows[0].n})` : `${task} (n = ${rows[0].n})`;
    const format = ppl ? (v) => `${Number(v.toPrecision(4))}` : (v) => `${Math.round(10 * v) / 10}`;
    $("score-charts").append(lineChart(title, places.map(labelOf), series, format, ppl ? undefined : 100, "budget"));
  }
}

const COSTS = [
  ["resident_bytes", "Resident memory", bytes], ["host_bytes", "Memory on the host", bytes],
  ["moved_bytes_per_token", "Moved per token", bytes], ["rows", "Rows attended", (v) => `${Math.round(v)}`],
  ["seconds", "Compression and answer", (v) => `${Number(v.toPrecision(3))} s`],
  ["prefill_seconds", "Reading the context", (v) => `${Number(v.toPrecision(3))} s`],
];

function startCosts() {
  const axis = $("cost-axis"), task = $("cost-task"), budget = $("cost-budget");
  const lengths = unique(DATA.results.map((r) => r.length)).sort((a, b) => a - b);
  fill(task, unique(DATA.results.map((r) => r.task)).map((t) => [t, t]));
  fill(budget, budgets(DATA.results).map((b) => [b, labelOf(b)]));
  const render = () => {
    const byLength = axis.value === "length";
    $("cost-task-label").hidden = byLength;
    $("cost-budget-label").hidden = !byLength;
    const rows = DATA.results.filter((r) => (byLength ? r.budget === Number(budget.value) : r.task === task.value));
    const places = byLength ? lengths.filter((l) => rows.some((r) => r.length === l)) : budgets(rows);
    $("cost-charts").replaceChildren(...COSTS.map(([name, title, format]) =>
      lineChart(title, byLength ? places.map(String) : places.map(labelOf),
        lines(rows, places, (r) => (byLength ? r.length : r.budget), (r) => r[name], false),
        format, undefined, byLength ? "tokens of the context" : "budget")));
  };
  if (lengths.length < 2) axis.parentElement.hidden = true;
  else axis.value = "length";
  [axis, task, budget].forEach((select) => select.addEventListener("change", render));
  render();
}
