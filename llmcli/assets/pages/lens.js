// The logit lens: a grid of rows and positions, and one place of it in full.
const [ENTROPY, KL, RANK, TARGET, TOP] = [0, 1, 2, 3, 4]; // where a cell has what
const WIDE = 64; // positions shown at a time
const rows = data.rows;
const count = data.positions.length;
const state = { row: rows.length - 1, place: count - 1, by: "probability", words: "token", first: 0 };

const BY = {
  probability: { words: "probability", low: "0", high: "1", at: (cell) => cell[TOP + 1] },
  target: { words: "target", low: "0", high: "1", at: (cell) => cell[TARGET] },
  rank: {
    words: "rank", low: `rank ${data.vocabulary}`, high: "rank 1 (logarithmic)",
    at: (cell) => 1 - Math.log(cell[RANK]) / Math.log(data.vocabulary),
  },
  entropy: {
    words: "entropy", low: "0", high: `${Math.log(data.vocabulary).toFixed(1)} nats`,
    at: (cell) => cell[ENTROPY] / Math.log(data.vocabulary),
  },
  kl: {
    words: "KL to output", low: "0", high: `${number(data.most_kl)} nats`,
    at: (cell) => (cell[KL] === null ? 1 : cell[KL] / (data.most_kl || 1)),
  },
};
const WORDS = [["token", "token"], ["percent", "percent"], ["rank", "rank"]];

const text = (id) => label({ id, text: data.texts[id] });
const percent = (share) => (share >= 0.9995 ? "100 %" : `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`);
const cell = (row, place) => rows[row].cells[place];
const token = (place) => label(data.tokens[data.positions[place]]);
const written = (place) => data.positions[place] >= data.prompt_tokens; // by the model

function cellWords(values) {
  if (state.words === "percent") return percent(values[TOP + 1]);
  return state.words === "rank" ? String(values[RANK]) : text(values[TOP]);
}

function makeCell(row, place) {
  const values = cell(row, place);
  const [red, green, blue] = colour(BY[state.by].at(values), false);
  const made = make("td", data.settled[place] === rows[row].name ? "settled" : "", cellWords(values));
  made.style.background = `rgb(${red}, ${green}, ${blue})`;
  made.style.color = luminance(red, green, blue) < 120 ? "#fff" : "#1d1d22";
  made.dataset.row = String(row);
  made.dataset.place = String(place);
  return made;
}

function drawGrid() {
  const places = Array.from({ length: Math.min(WIDE, count) }, (_, at) => state.first + at);
  const head = make("tr");
  head.append(make("th", "name", "reads"), ...places.map((place) => {
    const top = make("th", written(place) ? "new" : "", token(place));
    top.append(make("small", "", `${data.positions[place]}${written(place) ? ", generated" : ""}`));
    return top;
  }));
  const foot = (name, words) => {
    const line = make("tr");
    line.append(make("th", "name", name), ...places.map((place) => make("th", "", words(place))));
    return line;
  };
  const body = make("tbody");
  rows.forEach((row, at) => {
    const line = make("tr");
    line.append(make("th", "name", row.name), ...places.map((place) => makeCell(at, place)));
    body.append(line);
  });
  const [thead, tfoot] = [make("thead"), make("tfoot")];
  thead.append(head);
  tfoot.append(foot("settled", (place) => data.settled[place]),
    foot("target", (place) => text(data.targets[place].id)));
  $("grid").replaceChildren(thead, body, tfoot);
  $("span").textContent = `Positions ${data.positions[places[0]]} to ${data.positions[places.at(-1)]}`
    + ` of ${data.tokens.length}${data.tokens.length > data.prompt_tokens
      ? `, from ${data.prompt_tokens} on generated` : ""}; target: ${data.target}.`;
  for (const name of ["before", "after"]) $(name).hidden = count <= WIDE;
}

function drawScale() {
  const context = $("colours").getContext("2d");
  for (let x = 0; x < 256; x++) {
    context.fillStyle = `rgb(${colour(x / 255, false).join(",")})`;
    context.fillRect(x, 0, 1, 1);
  }
  $("low").textContent = BY[state.by].low;
  $("high").textContent = BY[state.by].high;
}

function pair(words, value) {
  const line = make("tr");
  line.append(make("td", "", words), make("td", "number", value));
  return line;
}

function tokenRow(id, share) {
  const line = make("tr");
  const track = make("td", "track");
  const bar = make("span");
  bar.style.width = `${100 * share}%`;
  track.append(bar);
  const value = make("td", "number", percent(share));
  value.dataset.id = String(id);
  value.dataset.probability = String(share);
  line.append(make("td", "mono", text(id)), track, value);
  return line;
}

function topRows(values) {
  const made = [];
  for (let at = TOP; at < values.length; at += 2) made.push(tokenRow(values[at], values[at + 1]));
  return made;
}

function drawPlace() {
  const values = cell(state.row, state.place);
  const row = rows[state.row];
  $("place").textContent = row.layer === null ? "Embedding" : `After ${row.name.includes("mid") ? "attention of " : ""}layer ${row.layer}`;
  $("place-words").textContent = `${row.full} at position ${data.positions[state.place]}, ${token(state.place)}${written(state.place) ? " (generated)" : ""}`;
  $("top").replaceChildren(...topRows(values));
  const target = data.targets[state.place];
  $("numbers").replaceChildren(
    pair(`rank of ${text(target.id)}`, String(values[RANK])),
    pair(`probability of ${text(target.id)}`, percent(values[TARGET])),
    pair("entropy, nats", number(values[ENTROPY])),
    pair("KL(output ‖ here), nats", number(values[KL])),
  );
  drawCurve(target);
  for (const one of document.querySelectorAll("td.chosen")) one.classList.remove("chosen");
  const chosen = document.querySelector(`td[data-row="${state.row}"][data-place="${state.place}"]`);
  if (chosen) {
    chosen.classList.add("chosen");
    chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

// The target's probability from row to row, at this position.
function drawCurve(target) {
  $("curve-words").textContent = `Probability of ${text(target.id)}, from row to row`;
  const canvas = $("curve");
  const [width, height, left, bottom] = [canvas.parentElement.clientWidth - 38, 150, 30, 18];
  const context = sized(canvas, width, height);
  const across = (row) => left + (row * (width - left - 6)) / Math.max(1, rows.length - 1);
  const down = (share) => 6 + (1 - share) * (height - bottom - 12);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css("--quiet");
  context.strokeStyle = css("--line");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    context.fillText(String(share), left - 6, down(share));
    stroke(context, [[left, down(share)], [width, down(share)]]);
  }
  context.textAlign = "center";
  const every = Math.ceil((rows.length * 26) / (width - left));
  rows.forEach((row, at) => {
    if (row.layer !== null && row.layer % every === 0) context.fillText(row.name, across(at), height - 6);
  });
  context.strokeStyle = css("--quiet");
  stroke(context, [[across(state.row), 0], [across(state.row), height - bottom]]);
  context.strokeStyle = css("--accent");
  context.lineWidth = 2;
  stroke(context, rows.map((_, at) => [across(at), down(cell(at, state.place)[TARGET])]));
}

function stroke(context, points) {
  context.beginPath();
  points.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
}

function draw() {
  choice("by", Object.entries(BY).map(([name, { words }]) => [name, words]), state.by,
    (by) => choose({ by }));
  choice("words", WORDS, state.words, (words) => choose({ words }));
  drawScale();
  drawGrid();
  drawPlace();
}

function choose(change) {
  Object.assign(state, change);
  state.row = Math.max(0, Math.min(rows.length - 1, state.row));
  state.place = Math.max(0, Math.min(count - 1, state.place));
  if (state.place < state.first || state.place >= state.first + WIDE) {
    state.first = state.place - (state.place % WIDE);
  }
  state.first = Math.max(0, Math.min(count - WIDE, state.first));
  toHash({ row: rows[state.row].full, position: data.positions[state.place], by: state.by,
    words: state.words });
  draw();
}

function page(by) {
  const first = Math.max(0, Math.min(count - WIDE, state.first + by * WIDE));
  choose({ first, place: Math.max(first, Math.min(first + WIDE - 1, state.place + by * WIDE)) });
}

function keyed(event) {
  act(event, {
    ArrowLeft: () => choose({ place: state.place - 1 }),
    ArrowRight: () => choose({ place: state.place + 1 }),
    ArrowUp: () => choose({ row: state.row - 1 }),
    ArrowDown: () => choose({ row: state.row + 1 }),
    c: () => choose({ by: next(Object.keys(BY), state.by) }),
    w: () => choose({ words: next(WORDS.map(([name]) => name), state.words) }),
    t: () => otherTheme(draw),
  });
}

function cellOf(event) {
  const found = event.target.closest("td");
  return found && { row: Number(found.dataset.row), place: Number(found.dataset.place) };
}

function tipOf(event) {
  const found = cellOf(event);
  if (!found) return hideTip();
  const values = cell(found.row, found.place);
  const table = make("table");
  for (let at = TOP; at < values.length; at += 2) {
    const row = make("tr");
    row.append(make("td", "mono", text(values[at])), make("td", "", percent(values[at + 1])));
    table.append(row);
  }
  const numbers = `rank ${values[RANK]} · entropy ${number(values[ENTROPY])} · KL ${number(values[KL])}`;
  return showTip(event, [make("b", "", `${rows[found.row].full}, position ${data.positions[found.place]}`),
    table, make("div", "", numbers)]);
}

function listen() {
  addEventListener("keydown", keyed);
  addEventListener("resize", drawPlace);
  $("theme").addEventListener("click", () => otherTheme(draw));
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
  const row = rows.findIndex((one) => one.full === wanted.row);
  const place = data.positions.findIndex((at) => String(at) === wanted.position);
  if (row >= 0) state.row = row;
  if (place >= 0) state.place = place;
  if (BY[wanted.by]) state.by = wanted.by;
  if (WORDS.some(([name]) => name === wanted.words)) state.words = wanted.words;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setTheme(["light", "dark"].includes(wanted.theme) ? wanted.theme : system, () => choose({}));
  document.body.dataset.ready = "1";
}

begin();
