// The text as one token sees it, or as it is seen.

// A number as it is kept here, with how far it may be off.
function weight(value) {
  const [kind, { low, high }] = [valued(state.layer), head()];
  if (kind === "scores") return `${number(value)} ± ${number((high - low) / 510)}`;
  if (kind === "signed") {
    return `${number(value)} ± ${number(Math.sqrt(Math.abs(value) * high) / 127 + 2e-5 * high)}`;
  }
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
    const most = around(state.layer) ? data.most : 1;
    const share = value === null ? 0 : bent(Math.abs(value) / most, state.bend);
    span.style.background = value === null ? "" : tinted(value, share);
    span.style.color = share > 0.6 ? (around(state.layer) ? "#fff" : "#1d1d22") : "";
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
  if (!around(state.layer)) return `rgba(${css("--accent-rgb")}, ${share})`;
  return `rgba(${css(value < 0 ? "--low-rgb" : "--high-rgb")}, ${share})`;
}

function drawTop(values, to) {
  $("top-words").textContent = to ? "Attends most to" : "Is attended to most by";
  const rank = valued(state.layer) === "signed" ? Math.abs : (value) => value;
  const best = values.map((value, at) => ({ value, at })).filter((one) => one.value !== null)
    .sort((one, other) => rank(other.value) - rank(one.value)).slice(0, 8);
  const most = Math.max(...best.map((one) => Math.abs(one.value)), 1e-9);
  $("top").replaceChildren(...best.map(({ value, at }) => {
    const row = make("tr");
    const track = make("td", "track");
    const bar = make("span");
    bar.style.width = `${(100 * Math.abs(value)) / (around(state.layer) ? most : 1)}%`;
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
