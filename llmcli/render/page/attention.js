// Attention: a map of all heads, the matrix of one of them, and the text seen by one token.
const T = data.tokens.length;
const LETTER = 7; // pixels a sign of the labels takes, about
const state = { layer: 0, head: 0, query: T - 1, bend: data.bend, map: "", direction: "to" };
let view = { row: 0, column: 0, size: T };
const decoded = new Map();

const layer = () => data.layers[state.layer];
const head = () => layer().heads[state.head];

// Where row i of a head begins: only what is visible is kept, row by row.
function offset(i, window) {
  if (!window || i <= window) return (i * (i + 1)) / 2;
  return (window * (window + 1)) / 2 + (i - window) * window;
}

// The numbers of one head: `at(query, key)`, null where masked.
function cells(layerIndex, headIndex) {
  const name = `${layerIndex} ${headIndex}`;
  if (!decoded.has(name)) {
    const { window, heads } = data.layers[layerIndex];
    const { low, high } = heads[headIndex];
    const all = bytes($(`cells-${layerIndex}-${headIndex}`).textContent.trim());
    const value = Float32Array.from({ length: 256 }, (_, step) =>
      data.signed ? low + ((high - low) * step) / 255 : (step / 255) ** 2);
    const first = (i) => (window ? Math.max(0, i - window + 1) : 0);
    const at = (i, j) => {
      if (j > i || j < first(i)) return null;
      return value[all[offset(i, window) + j - first(i)]];
    };
    decoded.set(name, { at, first });
  }
  return decoded.get(name);
}

// The place on the colour scale: a pattern's is 0 … 1 for all heads, scores have 0 in the middle.
function fraction(value) {
  if (!data.signed) return bent(value, state.bend);
  return 0.5 + 0.5 * Math.sign(value) * bent(Math.abs(value) / data.most, state.bend);
}

// Colours of a part of a matrix, `width` × `height` pixels: each the largest of what it covers.
function painted(matrix, part, width, height) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let y = 0; y < height; y++) {
    const top = Math.floor(part.row + (y * part.size) / height);
    const bottom = Math.max(top + 1, Math.floor(part.row + ((y + 1) * part.size) / height));
    for (let x = 0; x < width; x++) {
      const left = Math.floor(part.column + (x * part.size) / width);
      const right = Math.max(left + 1, Math.floor(part.column + ((x + 1) * part.size) / width));
      let most = null;
      for (let i = top; i < bottom && i < T; i++) {
        for (let j = left; j < right && j <= i; j++) {
          const value = matrix.at(i, j);
          if (value !== null && (most === null || value > most)) most = value;
        }
      }
      if (most === null) continue;
      const [red, green, blue] = colour(fraction(most), data.signed);
      pixels[y * width + x] = (255 << 24) | (blue << 16) | (green << 8) | red;
    }
  }
  return image;
}

function picture(image) {
  const buffer = make("canvas");
  buffer.width = image.width;
  buffer.height = image.height;
  buffer.getContext("2d").putImageData(image, 0, 0);
  return buffer;
}

function paste(context, buffer, x, y, width, height) {
  context.imageSmoothingEnabled = false;
  context.drawImage(buffer, x, y, width, height);
}

// A whole head in small; painted once for a scale, for the map is drawn at every step.
const small = new Map();

function thumbnail(row, column, size) {
  const name = `${row} ${column} ${size} ${state.bend}`;
  if (!small.has(name)) {
    const whole = { row: 0, column: 0, size: T };
    small.set(name, picture(painted(cells(row, column), whole, size, size)));
  }
  return small.get(name);
}

function hatched(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = css("--masked");
  context.fillRect(x, y, width, height);
  context.strokeStyle = css("--hatch");
  context.lineWidth = 1;
  for (let at = -height; at < width; at += 7) {
    context.beginPath();
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
    context.stroke();
  }
  context.restore();
}

// ---- the map of all heads

const map = { left: 30, top: 20, cell: 0, places: [] };

function placeHeads() {
  const most = Math.max(...data.layers.map((one) => one.heads.length));
  const room = innerWidth < 860 ? innerWidth - 110 : Math.min(innerWidth * 0.26, 520);
  map.cell = Math.max(11, Math.min(most > 6 ? 38 : 54, Math.floor((room - map.left) / (most * 1.08))));
  map.places = [];
  data.layers.forEach((one, row) => {
    let gaps = 0;
    const grouped = one.kv_heads < one.heads.length && one.kv_heads > 1;
    one.heads.forEach((each, column) => {
      if (grouped && column && each.kv_head !== one.heads[column - 1].kv_head) gaps += 5;
      const x = map.left + column * map.cell + gaps;
      map.places.push({ row, column, x, y: map.top + row * map.cell });
    });
  });
}

function metricRange(name) {
  const about = data.metrics.find((metric) => metric.name === name);
  const values = data.layers.flatMap((one) => one.heads.map((each) => each.metrics[name]));
  const most = Math.max(...values.filter((value) => value !== null), 0);
  return { about, low: about.low, high: about.high === null ? most || 1 : about.high };
}

function drawMap() {
  placeHeads();
  const width = Math.max(...map.places.map((place) => place.x)) + map.cell + 3;
  const height = map.top + data.layers.length * map.cell + 3;
  const context = sized($("overview"), width, height);
  const ratio = window.devicePixelRatio || 1;
  const inner = map.cell - 2;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css("--quiet");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.ceil(13 / map.cell);
  data.layers.forEach((one, row) => {
    const y = map.top + row * map.cell + inner / 2;
    if (row % every === 0) context.fillText(String(one.layer), map.left - 7, y);
  });
  context.textAlign = "center";
  for (const place of map.places) {
    const one = data.layers[place.row].heads[place.column];
    if (place.row === 0 && place.column % Math.ceil(18 / map.cell) === 0) {
      context.fillStyle = css("--quiet");
      context.fillText(String(one.head), place.x + inner / 2, map.top - 9);
    }
    drawHead(context, place, one, inner, ratio);
  }
  const chosen = map.places.find((one) => one.row === state.layer && one.column === state.head);
  context.strokeStyle = css("--accent");
  context.lineWidth = 2.5;
  context.strokeRect(chosen.x - 1, chosen.y - 1, inner + 2, inner + 2);
}

function drawHead(context, place, one, inner, ratio) {
  if (state.map === "patterns") {
    const size = Math.min(T, Math.round(inner * ratio));
    context.fillStyle = css("--masked");
    context.fillRect(place.x, place.y, inner, inner);
    paste(context, thumbnail(place.row, place.column, size), place.x, place.y, inner, inner);
    return;
  }
  const value = one.metrics[state.map];
  if (value === null) {
    hatched(context, place.x, place.y, inner, inner);
    return;
  }
  const { low, high } = metricRange(state.map);
  const [red, green, blue] = colour((value - low) / (high - low || 1), false);
  context.fillStyle = `rgb(${red}, ${green}, ${blue})`;
  context.fillRect(place.x, place.y, inner, inner);
  const letters = data.labels.filter((kind) => one.labels.includes(kind.name));
  if (!letters.length || inner < 10) return;
  context.fillStyle = luminance(red, green, blue) < 120 ? "#fff" : "#1d1d22";
  const shown = letters.map((kind) => kind.letter).join("").slice(0, inner < 18 ? 1 : 3);
  context.fillText(shown, place.x + inner / 2, place.y + inner / 2 + 0.5);
}

function headUnder(event) {
  const { offsetX, offsetY } = event;
  return map.places.find((one) => offsetX >= one.x && offsetX < one.x + map.cell
    && offsetY >= one.y && offsetY < one.y + map.cell);
}

function showMapWords() {
  const about = data.metrics.find((metric) => metric.name === state.map);
  $("map-words").textContent = about ? `${about.words}: ${about.formula}`
    : "Layers down, heads across; gaps part heads that share keys and values.";
  const found = new Set(data.layers.flatMap((one) => one.heads.flatMap((each) => each.labels)));
  $("legend").replaceChildren(...data.labels.filter((kind) => found.has(kind.name)).map((kind) => {
    const item = make("li");
    item.append(make("b", "", kind.letter),
      `${kind.name}: ${kind.metric} at least ${kind.threshold}`);
    return item;
  }));
}

// ---- the matrix of one head

const frame = { left: 0, top: 6, side: 0, bottom: 0 };

function drawMatrix() {
  const box = $("matrix").parentElement.clientWidth;
  const longest = Math.max(...data.tokens.map((token) => label(token).length));
  frame.left = Math.min(130, 16 + LETTER * Math.min(longest, 15) + (view.size > 60 ? 26 : 0));
  frame.bottom = frame.left;
  frame.side = Math.max(200, Math.min(box - frame.left - 4, innerHeight - frame.bottom - 120));
  const context = sized($("matrix"), frame.left + frame.side + 4, frame.top + frame.side + frame.bottom);
  hatched(context, frame.left, frame.top, frame.side, frame.side);
  const ratio = window.devicePixelRatio || 1;
  const size = Math.round(frame.side * ratio);
  const matrix = cells(state.layer, state.head);
  const image = picture(painted(matrix, view, size, size));
  paste(context, image, frame.left, frame.top, frame.side, frame.side);
  context.strokeStyle = css("--line");
  context.lineWidth = 1;
  context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.side + 1, frame.side + 1);
  drawLabels(context);
  drawCross(context);
  const pool = view.size / size;
  $("pooled").textContent = pool > 1 ? `A pixel is the largest of ${Math.ceil(pool)} × ${Math.ceil(pool)} cells.` : "";
}

function drawLabels(context) {
  const cell = frame.side / view.size;
  const step = Math.max(1, Math.ceil(13 / cell));
  context.font = "11.5px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const words = (at) => {
    const text = label(data.tokens[at]);
    const short = text.length > 15 ? `${text.slice(0, 14)}…` : text;
    return step > 1 ? `${short} ${at}` : short;
  };
  const paint = (at) => { context.fillStyle = css(at === state.query ? "--accent" : "--ink"); };
  for (let at = Math.ceil(view.row / step) * step; at < Math.min(T, view.row + view.size); at += step) {
    paint(at);
    context.fillText(words(at), frame.left - 7, frame.top + (at - view.row + 0.5) * cell);
  }
  for (let at = Math.ceil(view.column / step) * step; at < Math.min(T, view.column + view.size); at += step) {
    context.save();
    context.translate(frame.left + (at - view.column + 0.5) * cell, frame.top + frame.side + 7);
    context.rotate(-Math.PI / 2);
    paint(at);
    context.fillText(words(at), 0, 0);
    context.restore();
  }
}

// The chosen token's row, or its column where it is asked who attends to it.
function drawCross(context) {
  const cell = frame.side / view.size;
  const along = state.direction === "to";
  const at = (state.query - (along ? view.row : view.column)) * cell;
  if (at < -1e-6 || at >= frame.side) return;
  context.strokeStyle = css("--accent");
  context.lineWidth = cell < 6 ? 1 : 1.5;
  const out = cell < 6 ? 1.5 : 0; // around a thin row, not over it
  const [from, thick] = [at - out, cell + 2 * out];
  if (along) context.strokeRect(frame.left, frame.top + from, frame.side, thick);
  else context.strokeRect(frame.left + from, frame.top, thick, frame.side);
}

function cellUnder(event) {
  const cell = frame.side / view.size;
  const row = Math.floor(view.row + (event.offsetY - frame.top) / cell);
  const column = Math.floor(view.column + (event.offsetX - frame.left) / cell);
  const inside = event.offsetX >= frame.left && event.offsetY >= frame.top
    && event.offsetX < frame.left + frame.side && event.offsetY < frame.top + frame.side;
  return { row, column, inside: inside && row < T && column < T };
}

function zoom(event) {
  event.preventDefault();
  const cell = frame.side / view.size;
  const size = Math.max(Math.min(4, T), Math.min(T, view.size * (event.deltaY > 0 ? 1.25 : 0.8)));
  const across = (event.offsetX - frame.left) / frame.side;
  const down = (event.offsetY - frame.top) / frame.side;
  moveTo(view.row + (view.size - size) * down, view.column + (view.size - size) * across, size, cell);
}

function moveTo(row, column, size) {
  const within = (at) => Math.max(0, Math.min(T - size, at));
  view = { row: within(row), column: within(column), size };
  drawMatrix();
}

function matrixTip(event) {
  const { row, column, inside } = cellUnder(event);
  if (!inside) return hideTip();
  const value = cells(state.layer, state.head).at(row, column);
  const line = (name, at) => make("div", "", `${name} ${at}  ${label(data.tokens[at])}`);
  return showTip(event, [line("query", row), line("key", column),
    make("b", "", value === null ? "masked" : weight(value))]);
}

// ---- one token

// A number as it is kept here, with how far it may be off.
function weight(value) {
  if (data.signed) return `${number(value)} ± ${number((head().high - head().low) / 510)}`;
  return `${number(value)} ± ${number(Math.sqrt(value) / 255 + 4e-6)}`;
}

function drawTokens() {
  const matrix = cells(state.layer, state.head);
  const to = state.direction === "to";
  const values = data.tokens.map((_, at) =>
    (to ? matrix.at(state.query, at) : matrix.at(at, state.query)));
  [...$("tokens").children].forEach((span, at) => {
    const value = values[at];
    span.classList.toggle("masked", value === null);
    span.classList.toggle("chosen", at === state.query);
    span.dataset.weight = value === null ? "" : String(value);
    const share = value === null ? 0 : bent(Math.abs(value) / data.most, state.bend);
    span.style.background = value === null ? "" : tinted(value, share);
    span.style.color = share > 0.6 ? (data.signed ? "#fff" : "#1d1d22") : "";
  });
  const [box, chosen] = [$("tokens"), $("tokens").children[state.query]];
  const [above, below] = [chosen.offsetTop - box.offsetTop, box.clientHeight];
  if (above < box.scrollTop || above > box.scrollTop + below - 30) box.scrollTop = above - below / 2;
  const token = `${state.query} ${label(data.tokens[state.query])}`;
  $("query").textContent = `Token ${token}`;
  $("query-words").textContent = to ? "Coloured: what this token attends to. Click another one."
    : "Coloured: the later tokens that attend to this one. Click another one.";
  drawTop(values, to);
}

function tinted(value, share) {
  if (!data.signed) return `rgba(${css("--accent-rgb")}, ${share})`;
  return `rgba(${css(value < 0 ? "--low-rgb" : "--high-rgb")}, ${share})`;
}

function drawTop(values, to) {
  $("top-words").textContent = to ? "Attends most to" : "Is attended to most by";
  const best = values.map((value, at) => ({ value, at })).filter((one) => one.value !== null)
    .sort((one, other) => other.value - one.value).slice(0, 8);
  const most = Math.max(...best.map((one) => Math.abs(one.value)), 1e-9);
  $("top").replaceChildren(...best.map(({ value, at }) => {
    const row = make("tr");
    const track = make("td", "track");
    const bar = make("span");
    bar.style.width = `${(100 * Math.abs(value)) / (data.signed ? most : 1)}%`;
    bar.style.background = `rgb(${css(value < 0 ? "--low-rgb" : "--accent-rgb")})`;
    track.append(bar);
    row.append(make("td", "position", String(at)), make("td", "mono", label(data.tokens[at])),
      track, make("td", "number", number(value)));
    return row;
  }));
}

function makeTokens() {
  $("tokens").replaceChildren(...data.tokens.flatMap((token, at) => {
    const span = make("span", at < data.prompt_tokens ? "token" : "token new");
    span.title = `token ${at}, id ${token.id}${at < data.prompt_tokens ? "" : ", generated"}`;
    const space = token.text.match(/^ */)[0]; // not coloured, for it may end a line
    span.append(token.text.trim() === "" ? label(token) : token.text.slice(space.length));
    span.addEventListener("click", () => choose({ query: at }));
    return token.text === "" ? [" ", span] : [space, span];
  }));
}

// ---- all of it

function drawHeadWords() {
  const { kind, kv_heads: count, heads } = layer();
  const one = head();
  const many = heads.filter((each) => each.kv_head === one.kv_head).map((each) => each.head);
  $("head").textContent = `Layer ${layer().layer}, head ${one.head}`;
  const shared = many.length > 1 ? `shared by heads ${many.join(", ")}` : "its own";
  $("group").textContent = `${kind} attention; keys and values of head ${one.kv_head} of ${count}, ${shared}`;
  $("kinds").replaceChildren(...one.labels.map((name) => make("span", "chip", name)));
  $("metrics").replaceChildren(...data.metrics.map((metric) => {
    const row = make("tr");
    row.title = metric.formula;
    const value = make("td", "number", number(one.metrics[metric.name]));
    value.dataset.metric = metric.name;
    value.dataset.value = String(one.metrics[metric.name]);
    row.append(make("td", "", metric.words), value);
    return row;
  }));
}

function drawScale() {
  const context = $("colours").getContext("2d");
  for (let x = 0; x < 256; x++) {
    context.fillStyle = `rgb(${colour(x / 255, data.signed).join(",")})`;
    context.fillRect(x, 0, 1, 1);
  }
  const least = state.bend === "log" ? `< ${10 ** -data.decades}` : "0";
  $("low").textContent = data.signed ? number(-data.most) : least;
  $("high").textContent = data.signed ? number(data.most) : "1";
}

function drawChoices() {
  const bends = [["linear", "linear"], ["sqrt", "sqrt"], ["log", "log"]];
  choice("bend", bends, state.bend, (bend) => choose({ bend }));
  const ways = [["to", "attends to"], ["by", "is attended to by"]];
  choice("direction", ways, state.direction, (direction) => choose({ direction }));
}

function draw() {
  drawChoices();
  drawScale();
  showMapWords();
  drawMap();
  drawHeadWords();
  drawMatrix();
  drawTokens();
}

function choose(change) {
  Object.assign(state, change);
  state.layer = Math.max(0, Math.min(data.layers.length - 1, state.layer));
  state.head = Math.max(0, Math.min(layer().heads.length - 1, state.head));
  state.query = Math.max(0, Math.min(T - 1, state.query));
  $("map").value = state.map;
  toHash({ layer: layer().layer, head: head().head, query: state.query, scale: state.bend,
    map: state.map, direction: state.direction });
  draw();
}

function next(list, one) { return list[(list.indexOf(one) + 1) % list.length]; }

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const maps = ["patterns", ...data.metrics.map((metric) => metric.name)];
  const actions = {
    ArrowLeft: () => choose({ head: state.head - 1 }),
    ArrowRight: () => choose({ head: state.head + 1 }),
    ArrowUp: () => choose({ layer: state.layer - 1 }),
    ArrowDown: () => choose({ layer: state.layer + 1 }),
    j: () => choose({ query: state.query + 1 }),
    k: () => choose({ query: state.query - 1 }),
    d: () => choose({ direction: state.direction === "to" ? "by" : "to" }),
    s: () => choose({ bend: next(["linear", "sqrt", "log"], state.bend) }),
    m: () => choose({ map: next(maps, state.map) }),
    t: () => otherTheme(draw),
    0: () => moveTo(0, 0, T),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function listen() {
  addEventListener("keydown", keyed);
  addEventListener("resize", draw);
  $("theme").addEventListener("click", () => otherTheme(draw));
  $("map").addEventListener("change", (event) => choose({ map: event.target.value }));
  const overview = $("overview");
  overview.addEventListener("click", (event) => {
    const found = headUnder(event);
    if (found) choose({ layer: found.row, head: found.column });
  });
  overview.addEventListener("pointermove", (event) => {
    const found = headUnder(event);
    if (!found) return hideTip();
    const one = data.layers[found.row].heads[found.column];
    const words = [make("b", "", `layer ${data.layers[found.row].layer}, head ${one.head}`)];
    if (one.labels.length) words.push(make("div", "", one.labels.join(", ")));
    if (state.map !== "patterns") words.push(make("div", "", `${state.map} ${number(one.metrics[state.map])}`));
    return showTip(event, words);
  });
  overview.addEventListener("pointerleave", hideTip);
  listenToMatrix($("matrix"));
}

function listenToMatrix(matrix) {
  let held = null;
  matrix.addEventListener("wheel", zoom, { passive: false });
  matrix.addEventListener("dblclick", () => moveTo(0, 0, T));
  matrix.addEventListener("pointerleave", hideTip);
  matrix.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, ...view, moved: false };
    matrix.setPointerCapture(event.pointerId);
  });
  matrix.addEventListener("pointermove", (event) => {
    if (!held) return matrixTip(event);
    const cell = frame.side / view.size;
    const [right, down] = [event.offsetX - held.x, event.offsetY - held.y];
    held.moved = held.moved || Math.hypot(right, down) > 4;
    hideTip();
    if (held.moved) moveTo(held.row - down / cell, held.column - right / cell, view.size);
    return undefined;
  });
  matrix.addEventListener("pointerup", (event) => {
    const { row, column, inside } = cellUnder(event);
    if (held && !held.moved && inside) choose({ query: state.direction === "to" ? row : column });
    held = null;
  });
  matrix.addEventListener("pointercancel", () => { held = null; });
}

function begin() {
  $("heading").textContent = data.heading;
  $("model").textContent = data.title;
  $("precision").textContent = data.precision;
  const maps = [["patterns", data.signed ? "scores" : "patterns"],
    ...data.metrics.map((metric) => [metric.name, metric.words])];
  $("map").append(...maps.map(([name, words]) => {
    const option = make("option", "", words);
    option.value = name;
    return option;
  }));
  state.map = "patterns";
  makeTokens();
  showChecks();
  listen();
  const wanted = fromHash();
  const layerIndex = data.layers.findIndex((one) => String(one.layer) === wanted.layer);
  state.layer = Math.max(0, layerIndex);
  state.head = Math.max(0, layer().heads.findIndex((one) => String(one.head) === wanted.head));
  if (/^\d+$/.test(wanted.query || "")) state.query = Number(wanted.query);
  if (["linear", "sqrt", "log"].includes(wanted.scale)) state.bend = wanted.scale;
  if (maps.some(([name]) => name === wanted.map)) state.map = wanted.map;
  if (wanted.direction === "by") state.direction = "by";
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setTheme(["light", "dark"].includes(wanted.theme) ? wanted.theme : system, () => choose({}));
  document.body.dataset.ready = "1";
}

begin();
