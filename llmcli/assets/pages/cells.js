// What is shown, the numbers in steps, and how they become colours.
const T = data.tokens.length;
const state = { layer: 0, head: 0, query: T - 1, bend: data.bend, map: "", direction: "to" };
const decoded = new Map();

const layer = () => data.layers[state.layer];
const head = () => layer().heads[state.head];
// "plain": weights from 0 to 1; "signed": weights around 0; "scores".
const valued = (layerIndex) => data.layers[layerIndex].values;
const around = (layerIndex) => valued(layerIndex) !== "plain";

// The number that a step stands for.
function valueOf(step, kind, { low, high }) {
  if (kind === "scores") return low + ((high - low) * step) / 255;
  if (kind === "plain") return (step / 255) ** 2;
  const side = (step - 127) / 127;
  return Math.sign(side) * side ** 2 * high;
}

// Where row i of a head begins: only what is visible is kept, row by row.
function offset(i, window, chunks) {
  if (chunks) return ((i - i % window) * (window + 1) + (i % window) * (i % window + 1)) / 2;
  if (!window || i <= window) return (i * (i + 1)) / 2;
  return (window * (window + 1)) / 2 + (i - window) * window;
}

// The numbers of one head: `at(query, key)`, null where masked.
function cells(layerIndex, headIndex) {
  const name = `${layerIndex} ${headIndex}`;
  if (!decoded.has(name)) {
    const { window, chunks, heads } = data.layers[layerIndex];
    const all = bytes($(`cells-${layerIndex}-${headIndex}`).textContent.trim());
    const value = Float32Array.from({ length: 256 }, (_, step) =>
      valueOf(step, valued(layerIndex), heads[headIndex]));
    const first = (i) => (
      chunks ? i - i % window : window ? Math.max(0, i - window + 1) : 0);
    const at = (i, j) => {
      if (j > i || j < first(i)) return null;
      return value[all[offset(i, window, chunks) + j - first(i)]];
    };
    decoded.set(name, { at, first, layer: layerIndex });
  }
  return decoded.get(name);
}

// The place on the colour scale: a pattern's is 0 … 1 for all heads, what has signs has 0 in the middle.
function fraction(value, layerIndex) {
  if (!around(layerIndex)) return bent(value, state.bend);
  return 0.5 + 0.5 * Math.sign(value) * bent(Math.abs(value) / data.most, state.bend);
}

// Colours of a part of a matrix, `width` × `height` pixels: each the largest of what it covers,
// of weights with signs the one that is furthest from 0.
function painted(matrix, part, width, height) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const rank = valued(matrix.layer) === "signed" ? Math.abs : (value) => value;
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
          if (value !== null && (most === null || rank(value) > rank(most))) most = value;
        }
      }
      if (most === null) continue;
      const [red, green, blue] = colour(fraction(most, matrix.layer), around(matrix.layer));
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
