"use strict";

// Sorting: a button in every head; a second press turns the order round. Missing figures stay last.
function value(row, index) {
  const text = row.cells[index].dataset.value;
  return text === undefined ? NaN : Number(text);
}

function sort(head, index) {
  const button = head.querySelector(".sort");
  const turned = { ascending: "descending", descending: "ascending" };
  const order = turned[head.getAttribute("aria-sort")] || button.dataset.first;
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const body = head.closest("table").tBodies[0];
  const rows = [...body.rows].sort((one, other) => {
    const a = value(one, index), b = value(other, index);
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return sign * (a - b);
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table.comparison")) {
  [...table.tHead.rows[1].cells].forEach((head, index) => {
    head.querySelector(".sort").addEventListener("click", () => sort(head, index));
  });
}

// Wide tables: say so where a part of one is out of sight.
const sideways = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth;
  }
});
for (const hint of document.querySelectorAll(".sideways")) sideways.observe(hint.nextElementSibling);

// Legends: press a name to see its series alone in every figure of the section; press again to see all.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const section = button.closest("section");
    const alone = button.getAttribute("aria-pressed") !== "true";
    for (const other of section.querySelectorAll(".legend button")) {
      other.setAttribute("aria-pressed", String(alone && other.dataset.series === button.dataset.series));
    }
    for (const mark of section.querySelectorAll(".panels:not(.small) :is(.curve, .whisker, .marker)")) {
      mark.classList.toggle("faint", alone && !mark.classList.contains("n" + button.dataset.series));
    }
  });
}

// Light and dark: the system's choice until the button is pressed.
const theme = document.getElementById("theme");
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
}

function label() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", "Switch to " + (isDark() ? "light" : "dark") + " colours");
}

theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  label();
});
dark.addEventListener("change", label);
label();
document.documentElement.classList.add("scripted");
