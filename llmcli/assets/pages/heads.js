// The map of all heads: small patterns, or one number of each.
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

function listenToMap(overview) {
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
}
