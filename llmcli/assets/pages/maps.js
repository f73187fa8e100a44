// Maps of layers and heads, or of layers and positions, and the strongest terms or places.
const state = { map: 0 };

function cell(map, row, column) {
  const value = map.values[row][column];
  const made = make("td", "", value === null ? "" : number(value));
  if (value === null) return made;
  const [red, green, blue] = colour(map.places[row][column], true);
  made.style.background = `rgb(${red}, ${green}, ${blue})`;
  made.style.color = luminance(red, green, blue) < 120 ? "#fff" : "#1d1d22";
  made.addEventListener("pointermove", (event) => showTip(event, [
    make("b", "", `layer ${map.columns[column]}, ${map.names[row]}`),
    make("div", "", String(value)),
  ]));
  made.addEventListener("pointerleave", hideTip);
  return made;
}

function draw() {
  const map = data.maps[state.map];
  choice("which", data.maps.map((one, at) => [at, one.title]), state.map, show);
  const head = make("tr");
  head.append(make("th", "name", "layer"), ...map.columns.map((name) => make("th", "", name)));
  $("grid").replaceChildren(head, ...map.names.map((name, row) => {
    const line = make("tr");
    line.append(make("th", "name", name), ...map.columns.map((_, at) => cell(map, row, at)));
    return line;
  }));
}

function show(map) {
  state.map = map;
  draw();
}

function tokenSpan(token, at) {
  const span = make("span", "token", `${label(token)} `);
  const other = data.corrupted[at];
  const differs = other && other.id !== token.id ? `, corrupted ${label(other)}` : "";
  span.title = `token ${at}, id ${token.id}${differs}`;
  if (differs || at === data.tokens.length - 1) span.classList.add("chosen");
  return span;
}

$("heading").textContent = data.heading;
$("strongest").textContent = data.terms_heading;
$("note").textContent = data.note;
$("model").textContent = data.title;
$("words").textContent = data.words.join(" · ");
$("tokens").replaceChildren(...data.tokens.map(tokenSpan));
$("terms").replaceChildren(...data.terms.map(([words, value]) => {
  const row = make("tr");
  row.append(make("td", "", words), make("td", "number", number(value)));
  return row;
}));
$("theme").addEventListener("click", () => otherTheme(draw));
document.addEventListener("keydown", (event) => act(event, {
  m: () => show((state.map + 1) % data.maps.length),
  t: () => otherTheme(draw),
}));
showChecks();
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light", draw);
