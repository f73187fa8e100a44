// The matrix of one head, of which a part is shown.
const LETTER = 7; // pixels a sign of the labels takes, about
let view = { row: 0, column: 0, size: T };
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
  const size = Math.max(Math.min(4, T), Math.min(T, view.size * (event.deltaY > 0 ? 1.25 : 0.8)));
  const across = (event.offsetX - frame.left) / frame.side;
  const down = (event.offsetY - frame.top) / frame.side;
  moveTo(view.row + (view.size - size) * down, view.column + (view.size - size) * across, size);
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
