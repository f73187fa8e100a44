"use strict";
// What both pages share: data, colours, scales, the tip, light and dark. No text is ever made HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });

function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

function bytes(base64) {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) found[at] = text.charCodeAt(at);
  return found;
}

const tables = { plain: bytes(data.colours.plain), signed: bytes(data.colours.signed) };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The place 0 … 1 of a share on a scale: the same as in the terminal and in the pictures.
function bent(share, kind) {
  const part = Math.min(1, Math.max(0, share));
  if (kind === "sqrt") return Math.sqrt(part);
  if (kind === "log") return 1 + Math.log10(Math.max(part, 10 ** -data.decades)) / data.decades;
  return part;
}

function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1);
  return size < 10 ? value.toFixed(3) : size < 1000 ? value.toFixed(1) : value.toFixed(0);
}

function label(token) {
  return token.text === "" ? `#${token.id}` : token.text.replaceAll(" ", "␣");
}

function luminance(red, green, blue) {
  return 0.299 * red + 0.587 * green + 0.114 * blue;
}

function colour(fraction, signed) {
  const table = signed ? tables.signed : tables.plain;
  const at = 3 * Math.round(255 * Math.min(1, Math.max(0, fraction)));
  return [table[at], table[at + 1], table[at + 2]];
}

function choice(id, names, chosen, onChoose) {
  const group = $(id);
  group.replaceChildren(...names.map(([name, words]) => {
    const button = make("button", "", words);
    button.setAttribute("aria-pressed", String(name === chosen));
    button.addEventListener("click", () => onChoose(name));
    return button;
  }));
}

function showTip(event, content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width
    : event.clientX + 16;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - 16 - box.height
    : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() { $("tip").hidden = true; }

function setTheme(theme, redraw) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "light" : "dark";
  redraw();
}

function otherTheme(redraw) {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", redraw);
}

// A canvas of so many CSS pixels, sharp on any screen; drawing is in CSS pixels.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function showChecks() {
  $("alarm").hidden = data.checks.every((check) => check.ok);
  $("checks").replaceChildren(...data.checks.map((check) => {
    const value = check.value === null ? "nan" : number(check.value);
    const off = check.tolerance !== 0 ? ` · ${value} of ${number(check.tolerance)} allowed`
      : check.ok ? "" : ` · ${value} (must be 0)`;
    const where = check.ok || !check.where ? "" : ` · worst at ${check.where}`;
    return make("li", check.ok ? "good" : "bad", `${check.words}${off}${where}`);
  }));
}

function fromHash() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function toHash(state) {
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
}

function next(list, one) { return list[(list.indexOf(one) + 1) % list.length]; }

// Runs the action of a key; with Ctrl, Alt or Meta keys are the browser's.
function act(event, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}
