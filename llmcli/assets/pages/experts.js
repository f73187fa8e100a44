// Experts: a grid of layers and positions, one place of it in full, the load of one layer.
const WIDE = 64; // positions shown at a time
const layers = data.layers;
const count = data.positions.length;
const state = { layer: 0, place: count - 1, by: "weight", expert: -1, first: 0 };

const weights = (layer, place) => part(layer, place, layers[layer].weights);
const chosen = (layer, place) => part(layer, place, layers[layer].chosen);
const part = (layer, place, all) => all.slice(place * layers[layer].per_token, (place + 1) * layers[layer].per_token);
const most = (values) => values.reduce((best, value) => Math.max(best, value ?? 0), 0) || 1;
const largest = most(layers.map((layer) => most(layer.weights)));
const widest = layers.map((layer) => most(layer.margins));

const BY = {
  weight: {
    words: "largest weight", low: "0", high: () => number(largest),
    at: (layer, place) => most(weights(layer, place)) / largest,
  },
  margin: {
    words: "margin", low: "0", high: () => "the layer's largest",
    at: (layer, place) => (layers[layer].margins[place] ?? 0) / widest[layer],
  },
  shared: {
    words: "shared", low: "0", high: () => "1",
    at: (layer, place) => (layers[layer].shared ? layers[layer].shared[place] ?? 0 : 0),
  },
};
if (layers.every((layer) => layer.shared === null)) delete BY.shared;

const token = (place) => label(data.tokens[data.positions[place]]);
const written = (place) => data.positions[place] >= data.prompt_tokens; // by the model
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// With an expert chosen, what it counts where its layer takes it; nothing elsewhere.
function fraction(layer, place) {
  if (state.expert < 0) return BY[state.by].at(layer, place);
  const at = layer === state.layer ? chosen(layer, place).indexOf(state.expert) : -1;
  return at < 0 ? null : weights(layer, place)[at] / largest;
}

function makeCell(layer, place) {
  const made = make("td", "", chosen(layer, place).join(" "));
  const found = fraction(layer, place);
  if (found !== null) {
    const [red, green, blue] = colour(found, false);
    made.style.background = `rgb(${red}, ${green}, ${blue})`;
    made.style.color = luminance(red, green, blue) < 120 ? "#fff" : "#1d1d22";
  }
  if (layer === state.layer && place === state.place) made.classList.add("chosen");
  made.dataset.layer = String(layer);
  made.dataset.place = String(place);
  return made;
}

function drawGrid() {
  const places = Array.from({ length: Math.min(WIDE, count) }, (_, at) => state.first + at);
  const head = make("tr");
  head.append(make("th", "name", "layer"), ...places.map((place) => {
    const top = make("th", written(place) ? "new" : "", token(place));
    top.append(make("small", "", `${data.positions[place]}${written(place) ? ", generated" : ""}`));
    return top;
  }));
  const body = make("tbody");
  layers.forEach((layer, at) => {
    const line = make("tr");
    line.append(make("th", "name", String(layer.layer)), ...places.map((place) => makeCell(at, place)));
    body.append(line);
  });
  const top = make("thead");
  top.append(head);
  $("grid").replaceChildren(top, body);
  const last = data.positions[places[places.length - 1]];
  $("span").textContent = `positions ${data.positions[places[0]]} to ${last} of ${data.tokens.length} tokens`
    + (state.expert < 0 ? "" : ` · what expert ${state.expert} of layer ${layers[state.layer].layer} counts`);
  for (const name of ["before", "after"]) $(name).hidden = count <= WIDE;
  $("low").textContent = BY[state.by].low;
  $("high").textContent = state.expert < 0 ? BY[state.by].high() : number(largest);
}

function bar(share) {
  const track = make("td", "track");
  const full = make("span");
  full.style.width = `${100 * Math.min(1, share)}%`;
  track.append(full);
  return track;
}

function drawPlace() {
  const layer = layers[state.layer];
  $("place").textContent = `Layer ${layer.layer}, position ${data.positions[state.place]}: ${token(state.place)}`;
  const shared = layer.shared ? ` · shared ${percent(layer.shared[state.place])}` : "";
  $("place-words").textContent = `${layer.about} · margin ${number(layer.margins[state.place])}${shared}`;
  const own = weights(state.layer, state.place);
  $("chosen").replaceChildren(...chosen(state.layer, state.place).map((expert, at) => {
    const row = make("tr");
    row.append(make("td", "", `expert ${expert}`), bar(own[at] / largest), make("td", "number", number(own[at])));
    return row;
  }));
  $("load-words").textContent = `Load of layer ${layer.layer}`;
  const unused = layer.load.filter((load) => load === 0).length;
  $("balance").textContent = `balance ${number(layer.balance)} · ${unused} of ${layer.experts} never taken`;
  const order = layer.load.map((load, expert) => [load, expert]).sort((a, b) => b[0] - a[0]);
  const top = most(layer.load);
  $("load").replaceChildren(...order.map(([load, expert]) => {
    const row = make("tr");
    const button = make("button", "", `expert ${expert}`);
    button.setAttribute("aria-pressed", String(expert === state.expert));
    button.addEventListener("click", () => choose({ expert: expert === state.expert ? -1 : expert }));
    const first = make("td");
    first.append(button);
    row.append(first, bar(load / top), make("td", "number", percent(load / count)));
    return row;
  }));
}

function draw() {
  choice("by", Object.entries(BY).map(([name, by]) => [name, by.words]), state.by, (by) => choose({ by }));
  drawGrid();
  drawPlace();
  const context = $("colours").getContext("2d");
  for (let at = 0; at < 256; at++) {
    const [red, green, blue] = colour(at / 255, false);
    context.fillStyle = `rgb(${red}, ${green}, ${blue})`;
    context.fillRect(at, 0, 1, 1);
  }
}

function choose(change) {
  Object.assign(state, change);
  state.layer = Math.min(layers.length - 1, Math.max(0, state.layer));
  state.place = Math.min(count - 1, Math.max(0, state.place));
  const last = Math.max(0, count - WIDE);
  if (state.place < state.first) state.first = state.place;
  if (state.place >= state.first + WIDE) state.first = state.place - WIDE + 1;
  state.first = Math.min(last, Math.max(0, state.first));
  toHash({
    layer: layers[state.layer].layer, position: data.positions[state.place], by: state.by,
    expert: state.expert, theme: document.documentElement.dataset.theme,
  });
  draw();
}

function page(way) {
  const first = Math.min(Math.max(0, count - WIDE), Math.max(0, state.first + way * WIDE));
  const place = Math.min(first + WIDE - 1, Math.max(first, state.place));
  choose({ first, place });
}

function keyed(event) {
  act(event, {
    ArrowLeft: () => choose({ place: state.place - 1 }),
    ArrowRight: () => choose({ place: state.place + 1 }),
    ArrowUp: () => choose({ layer: state.layer - 1 }),
    ArrowDown: () => choose({ layer: state.layer + 1 }),
    c: () => choose({ by: next(Object.keys(BY), state.by) }),
    Escape: () => choose({ expert: -1 }),
    t: () => otherTheme(() => choose({})),
  });
}

function cellOf(event) {
  const found = event.target.closest("td");
  return found && { layer: Number(found.dataset.layer), place: Number(found.dataset.place) };
}

function tipOf(event) {
  const found = cellOf(event);
  if (!found) return hideTip();
  const own = weights(found.layer, found.place);
  const table = make("table");
  chosen(found.layer, found.place).forEach((expert, at) => {
    const row = make("tr");
    row.append(make("td", "", `expert ${expert}`), make("td", "", number(own[at])));
    table.append(row);
  });
  const where = `layer ${layers[found.layer].layer}, position ${data.positions[found.place]}: ${token(found.place)}`;
  return showTip(event, [make("b", "", where), table,
    make("div", "", `margin ${number(layers[found.layer].margins[found.place])}`)]);
}

function listen() {
  addEventListener("keydown", keyed);
  $("theme").addEventListener("click", () => otherTheme(() => choose({})));
  $("before").addEventListener("click", () => page(-1));
  $("after").addEventListener("click", () => page(1));
  $("grid").addEventListener("click", (event) => {
    const found = cellOf(event);
    if (found) choose(found);
  });
  $("grid").addEventListener("pointermove", tipOf);
  $("grid").addEventListener("pointerleave", hideTip);
}

function begin() {
  $("model").textContent = data.title;
  showChecks();
  listen();
  const wanted = fromHash();
  const layer = layers.findIndex((one) => String(one.layer) === wanted.layer);
  const place = data.positions.findIndex((at) => String(at) === wanted.position);
  if (layer >= 0) state.layer = layer;
  if (place >= 0) state.place = place;
  if (BY[wanted.by]) state.by = wanted.by;
  const expert = Number(wanted.expert ?? -1);
  if (Number.isInteger(expert) && expert < most(layers.map((one) => one.experts))) state.expert = expert;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setTheme(["light", "dark"].includes(wanted.theme) ? wanted.theme : system, () => choose({}));
  document.body.dataset.ready = "1";
}

begin();
