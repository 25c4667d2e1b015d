const MOST_LISTED = 10;

/** The viewer shows one answer; what is chosen stands in the address, so a view can be linked to. */
class SpanViewer {
  constructor() {
    fill($("v-trace"), DATA.traces.map((t, i) => [i,
      `${t.task} #${t.number}, ${t.policy}, ${t.budget_label}, score ${Math.round(t.score)}${t.seed ? `, seed ${t.seed}` : ""}`]));
    $("v-trace").addEventListener("change", () => { this.open(Number($("v-trace").value)); this.show(); });
    for (const id of ["v-layer", "v-head", "v-steps"]) $(id).addEventListener("change", () => this.show());
    addEventListener("hashchange", () => this.follow());
    $("viewer").hidden = false;
    this.open(0);
    this.follow();
    if (!location.hash.startsWith("#trace=")) this.show(false);
  }

  /** Goes to what the address names, when it names a view. */
  follow() {
    if (!location.hash.startsWith("#trace=")) return;
    const wanted = new URLSearchParams(location.hash.slice(1));
    const number = Number(wanted.get("trace"));
    if (!DATA.traces[number]) return;
    if (number !== this.number) this.open(number);
    for (const name of ["layer", "head"]) {
      const select = $(`v-${name}`);
      select.value = wanted.get(name) ?? "";
      if (select.selectedIndex < 0) select.value = "";
    }
    const step = $("v-steps").querySelector(`input[value="${Number(wanted.get("step") ?? -1)}"]`);
    if (step) step.checked = true;
    this.show(false);
    if (!$("spans").contains(document.activeElement)) $("spans").scrollIntoView();
  }

  open(number) {
    const trace = (this.trace = DATA.traces[number]);
    this.number = number;
    $("v-trace").value = number;
    this.bits = Uint8Array.from(atob(trace.zooms), (c) => c.charCodeAt(0));
    $("v-heads").textContent = trace.heads === "kv" ? "KV head" : "Query head";
    fill($("v-layer"), [["", "all"], ...trace.layers.map((l, i) => [i, String(l)])]);
    fill($("v-head"), [["", "all"], ...Array.from({ length: trace.shape[1] }, (_, i) => [i, String(i)])]);
    $("v-facts").replaceChildren(...[["Question", trace.question], ["Expected", trace.answers.join(" | ")], ["Output", trace.output]]
      .map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, ` ${text}`))));
    const radio = (value, text, spoken) => {
      const input = make("input", { type: "radio", name: "v-step", value, "aria-label": spoken });
      return make("label", {}, input, make("span", { "aria-hidden": "true" }, text));
    };
    const shown = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "·";
    $("v-steps").replaceChildren($("v-steps").querySelector("legend"), radio(-1, "whole answer", "whole answer"),
      ...trace.tokens.map((t, i) => radio(i, shown(t), `token ${i + 1}: ${t.trim() || "white space"}`)));
    $("v-steps").querySelector("input").checked = true;
    this.spans = [];
    $("v-text").replaceChildren(...trace.pieces.map(([first, length, text, span, holds]) => {
      const piece = make(span < 0 ? "b" : "span", { class: (span < 0 ? "x" : "s") + (holds ? " holds" : "") }, text);
      if (span < 0) piece.title = `${length} exact tokens from ${first}`;
      else this.spans[span] = { piece, first, length, text, holds };
      return piece;
    }));
  }

  /** How often each span was zoomed into, over the chosen layers, heads and steps; and how often it could have been. */
  counts() {
    const [layers, heads, steps, spans] = this.trace.shape, row = Math.ceil(spans / 8);
    const chosen = (id, n) => ($(id).value === "" ? [...Array(n).keys()] : [Number($(id).value)]);
    const step = Number($("v-steps").querySelector("input:checked").value);
    const picked = { layers: chosen("v-layer", layers), heads: chosen("v-head", heads), steps: step < 0 ? [...Array(steps).keys()] : [step], step };
    const counts = new Uint32Array(spans);
    for (const l of picked.layers) for (const h of picked.heads) for (const t of picked.steps) {
      const start = ((l * heads + h) * steps + t) * row;
      for (let i = 0; i < row; i++) {
        const byte = this.bits[start + i];
        if (byte) for (let b = 0; b < 8; b++) if (byte & (128 >> b)) counts[8 * i + b]++;
      }
    }
    return { ...picked, counts, most: picked.layers.length * picked.heads.length * picked.steps.length };
  }

  show(linking = true) {
    const { counts, most, step, steps } = this.counts();
    const top = Math.max(1, ...counts), percent = (n) => `${(100 * n / most).toFixed(most > 1 ? 1 : 0)}%`;
    let zooms = 0, tokens = 0, touched = 0, held = 0, holders = 0;
    this.spans.forEach(({ piece, first, length, holds }, i) => {
      piece.style.setProperty("--v", (counts[i] / top).toFixed(3));
      piece.dataset.zooms = counts[i];
      piece.title = `span ${i}, tokens ${first} to ${first + length - 1}: zoomed ${counts[i]} of ${most} times (${percent(counts[i])})`;
      zooms += counts[i];
      tokens += counts[i] * length;
      touched += counts[i] > 0;
      if (holds) { held += counts[i]; holders++; }
    });
    const what = step < 0 ? `The whole answer, ${steps.length} tokens` : `Token ${step + 1} of ${this.trace.tokens.length}, “${this.trace.tokens[step]}”`;
    const each = most > 1 ? " for each token, layer and head" : "";
    const answer = holders ? ` Spans with an expected answer: zoomed ${percent(held / holders)} of the time.` : " No span holds an expected answer.";
    $("v-status").textContent = `${what}: ${Number((zooms / most).toFixed(1))} of ${this.spans.length} spans (${Number((tokens / most).toFixed(1))} tokens) zoomed${each}; ${touched} spans at least once.${answer}`;
    $("v-top").textContent = most > 1 ? `${percent(top)} of the time` : "zoomed";
    this.list(counts, percent);
    if (linking) this.link(step);
  }

  list(counts, percent) {
    const order = [...counts.keys()].filter((i) => counts[i]).sort((a, b) => counts[b] - counts[a] || a - b).slice(0, MOST_LISTED);
    $("v-list").replaceChildren(...order.map((i) => {
      const { piece, first, length, text } = this.spans[i];
      const button = make("button", { type: "button" }, text.trim() || "(white space)");
      button.addEventListener("click", () => {
        $("v-text").querySelectorAll(".found").forEach((e) => e.classList.remove("found"));
        piece.classList.add("found");
        piece.scrollIntoView({ block: "center" });
      });
      return make("tr", {}, make("td", { class: "num" }, percent(counts[i])),
        make("td", { class: "num" }, `${first}–${first + length - 1}`), make("td", {}, button));
    }));
  }

  link(step) {
    const view = new URLSearchParams({ trace: this.number });
    for (const name of ["layer", "head"]) if ($(`v-${name}`).value !== "") view.set(name, $(`v-${name}`).value);
    if (step >= 0) view.set("step", step);
    history.replaceState(null, "", `#${view}`);
  }
}

startTheme();
startFilters();
startScores();
startCosts();
if (DATA.traces.length) new SpanViewer();
document.documentElement.dataset.ready = "true";
