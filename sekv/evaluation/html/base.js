"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/** An element with attributes and children; text stays text. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
}

function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 999.5 && i < units.length - 1; i++) n /= 1000;
  return `${Number(n.toPrecision(3))} ${units[i]}`;
}

/** Selects that show some of many elements: all filters of a section must agree. */
function startFilters() {
  for (const section of document.querySelectorAll("section")) {
    const selects = [...section.querySelectorAll("select[data-filter]")];
    if (!selects.length) continue;
    const items = [...document.querySelectorAll(selects[0].dataset.filter)];
    const count = section.querySelector("output");
    const apply = () => {
      for (const item of items)
        item.hidden = selects.some((select) => select.value && item.dataset[select.dataset.by] !== select.value);
      if (count) count.textContent = `${items.filter((item) => !item.hidden).length} shown`;
    };
    selects.forEach((select) => select.addEventListener("change", apply));
    apply();
  }
  document.querySelectorAll(".controls").forEach((controls) => (controls.hidden = false));
}

function startTheme() {
  const button = $("theme"), root = document.documentElement;
  const dark = () => root.dataset.theme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const label = () => (button.textContent = dark() ? "Light" : "Dark");
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  button.hidden = false;
  label();
}
