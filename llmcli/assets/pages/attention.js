// The page: one choice of layer, head and token, drawn as map, matrix and text.

function drawHeadWords() {
  const { kind, kv_heads: count, heads } = layer();
  const one = head();
  const many = heads.filter((each) => each.kv_head === one.kv_head).map((each) => each.head);
  $("head").textContent = `Layer ${layer().layer}, head ${one.head}`;
  const shared = many.length > 1 ? `shared by heads ${many.join(", ")}` : "its own";
  const { note } = layer();
  $("group").textContent = note ? `${kind}: ${note}.`
    : `${kind} attention; keys and values of head ${one.kv_head} of ${count}, ${shared}`;
  $("kinds").replaceChildren(...one.labels.map((name) => make("span", "chip", name)));
  $("metrics").replaceChildren(...data.metrics.map((metric) => {
    const row = make("tr");
    row.title = `${metric.name} = ${metric.formula}`;
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
    context.fillStyle = `rgb(${colour(x / 255, around(state.layer)).join(",")})`;
    context.fillRect(x, 0, 1, 1);
  }
  const least = state.bend === "log" ? `< ${10 ** -data.decades}` : "0";
  $("low").textContent = around(state.layer) ? number(-data.most) : least;
  $("high").textContent = around(state.layer) ? number(data.most) : "1";
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

function keyed(event) {
  if (event.target.tagName === "SELECT") return;
  const maps = ["patterns", ...data.metrics.map((metric) => metric.name)];
  act(event, {
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
  });
}

function listen() {
  addEventListener("keydown", keyed);
  addEventListener("resize", draw);
  $("theme").addEventListener("click", () => otherTheme(draw));
  $("map").addEventListener("change", (event) => choose({ map: event.target.value }));
  listenToMap($("overview"));
  listenToMatrix($("matrix"));
}

function begin() {
  $("heading").textContent = data.heading;
  $("model").textContent = data.title;
  $("precision").textContent = data.precision;
  const maps = [["patterns", data.what === "scores" ? "scores" : "patterns"],
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
