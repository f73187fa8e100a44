// Diff: a map of layers and tokens, the activations that differ by themselves, the parameters.
const decades = (value) => (value ? 1 + Math.log10(Math.max(value, 1e-8)) / 8 : 0);
const spelled = (token) => (token.id === null ? "" : label({ ...token, text: token.text ?? "" }));

function cell(value, tip) {
  const made = make("td", "", value ? number(value) : "0");
  const [red, green, blue] = colour(decades(value), false);
  made.style.background = `rgb(${red}, ${green}, ${blue})`;
  made.style.color = luminance(red, green, blue) < 120 ? "#fff" : "#1d1d22";
  made.addEventListener("pointermove", (event) => showTip(event, tip.map((line) => make("div", "", line))));
  made.addEventListener("pointerleave", hideTip);
  return made;
}

function row(name, cells) {
  const made = make("tr");
  made.append(make("th", "name", name), ...cells);
  return made;
}

function about(token) {
  return [
    `position ${token.position}: ${spelled(token)}`,
    `KL(A‖B) ${number(token.kl)} · KL(B‖A) ${number(token.reverse_kl)}`,
    `logprob ${number(token.a)} → ${number(token.b)}, rank ${token.rank_a} → ${token.rank_b}`,
    `top of A ${label(token.top_a)}, rank ${token.top_a_in_b} in B`,
    `top of B ${label(token.top_b)}, rank ${token.top_b_in_a} in A`,
  ];
}

function draw() {
  const tokens = data.tokens.slice(0, data.activations || 256);
  $("grid").replaceChildren(
    row("token", tokens.map((token) => make("th", "", spelled(token)))),
    row("KL", tokens.map((token) => cell(token.kl, about(token)))),
    ...data.streams.map((one) => row(one.name, one.errors.map((error, at) =>
      cell(error, [`${one.name}: ${number(error)}`, ...(tokens[at] ? about(tokens[at]) : [])])))),
  );
  $("nodes").replaceChildren(
    ...data.nodes.map((one) => row(one.name, [cell(one.error, [`${one.where}: ${number(one.error)}`]),
      make("td", "number", one.share === null ? "" : `${number(one.share)} of rounding`)])),
    ...data.parameters.map((one) => row(one.name, [cell(one.error, [one.name]),
      make("td", "number", `${one.differing_rows} of ${one.rows} rows`)])),
  );
}

function begin() {
  $("lines").replaceChildren(...data.lines.map((line) => make("p", "", line)));
  showChecks();
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  addEventListener("keydown", (event) => act(event, { t: () => otherTheme(draw) }));
  $("theme").addEventListener("click", () => otherTheme(draw));
  setTheme(system, draw);
  document.body.dataset.ready = "1";
}

begin();
