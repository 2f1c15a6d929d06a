// Runs the network of network.json and model.onnx on the drawn image, and computes the radius as onelip does:
//   R = min over j of (f_y - f_j - rounding) / slope[y][j]
import * as ort from "./ort.wasm.min.mjs";

const $ = (id) => document.getElementById(id);
const network = await (await fetch("network.json")).json();
const [channels, height, width] = network.shape;
const plane = height * width;
const pixels = new Uint8Array(channels * plane);
let chosen = null; // {pixels, result}
let cursor = null; // pixel of the keyboard: [x, y]
let session; // once the network is loaded
let busy = false;
let waiting = false;

ort.env.wasm.numThreads = 1; // more would need headers that simple servers do not send
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

function show(canvas, image) {
  canvas.width = width;
  canvas.height = height;
  const content = new ImageData(width, height);
  for (let p = 0; p < plane; p++) {
    for (let c = 0; c < 3; c++) content.data[4 * p + c] = image[(channels === 1 ? 0 : c) * plane + p];
    content.data[4 * p + 3] = 255;
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(content, 0, 0);
}

// The largest radius and its pixel budget. The sound radius is made smaller by a factor 1 - 2^-48: more than the
// rounding of this computation, which onelip does in exact fractions.
function certified(scores) {
  let best = 0;
  for (let j = 1; j < scores.length; j++) if (scores[j] > scores[best]) best = j;
  let radius = Math.sqrt(pixels.length);
  for (let j = 0; j < scores.length; j++) {
    if (j === best) continue;
    const margin = scores[best] - scores[j] - network.rounding;
    if (!(margin > 0)) radius = 0;
    else if (network.slope[best][j] > 0) radius = Math.min(radius, margin / network.slope[best][j]);
  }
  if (!scores.every(Number.isFinite)) radius = 0;
  if (network.mode === "sound") radius *= 1 - 2 ** -48;
  const budget = network.mode === "sound" && radius > 0 ? Math.floor((255 * radius) ** 2) : null;
  return { best, radius, budget };
}

function distance(image, other) {
  let sum = 0;
  for (let k = 0; k < image.length; k++) sum += (image[k] - other[k]) ** 2;
  return sum;
}

function report(scores, image) {
  const found = certified(scores);
  const name = network.classes[found.best];
  $("class").textContent = name;
  // Rounded down, as everywhere in onelip.
  $("radius").textContent = found.radius > 0 ? (Math.floor(found.radius * 1e4) / 1e4).toFixed(4) : "not certified";
  $("pixels").textContent =
    found.budget !== null ? String(found.budget)
    : network.mode === "sound" ? "not certified" : "only with the float64 model";
  if (chosen && !chosen.result && distance(image, chosen.pixels) === 0) chosen.result = found;
  if (chosen && chosen.result) {
    const moved = distance(image, chosen.pixels);
    const limit = chosen.result.budget;
    const within = limit !== null && moved <= limit ? ", so the class must be the same" : "";
    $("changed").textContent = `${moved}${limit === null ? "" : ` of the ${limit} of the chosen image`}${within}`;
  }
  $("changed").hidden = $("changed-name").hidden = !chosen;
  const top = Math.max(...scores), low = Math.min(...scores);
  [...$("scores").rows].forEach((row, j) => {
    row.classList.toggle("best", j === found.best);
    row.cells[1].textContent = scores[j].toFixed(3);
    row.cells[2].firstChild.value = top > low ? (scores[j] - low) / (top - low) : 0;
  });
  Object.assign(document.body.dataset, { class: name, radius: found.radius, pixels: found.budget, scores: scores.join(" ") });
}

async function update() {
  show($("image"), pixels);
  if (!session) return; // still loading; the image is evaluated then
  if (busy) {
    waiting = true;
    return;
  }
  busy = true;
  try {
    do {
      waiting = false;
      // The chosen image comes first, before what was drawn on it: the limit of its changes is its own.
      const image = (chosen && !chosen.result ? chosen.pixels : pixels).slice();
      const { logits } = await session.run({ image: new ort.Tensor("uint8", image, [1, channels, height, width]) });
      report(Array.from(logits.data), image);
      waiting ||= distance(image, pixels) > 0;
    } while (waiting);
  } finally {
    busy = false;
  }
  document.body.dataset.done = Number(document.body.dataset.done || 0) + 1;
}

function colour() {
  if (channels === 1) return [Number($("light").value)];
  return [1, 3, 5].map((at) => parseInt($("colour").value.slice(at, at + 2), 16));
}

// A round brush with a soft border of one pixel.
function paint(x, y) {
  const size = Number($("size").value);
  const ink = colour();
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const part = Math.min(1, Math.max(0, size + 0.5 - Math.hypot(column + 0.5 - x, row + 0.5 - y)));
      if (!part) continue;
      for (let c = 0; c < channels; c++) {
        const at = c * plane + row * width + column;
        pixels[at] = Math.round(pixels[at] + part * (ink[c % ink.length] - pixels[at]));
      }
    }
  }
}

function place(event) {
  const box = $("image").getBoundingClientRect();
  return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
}

let last = null;
$("image").addEventListener("pointerdown", (event) => {
  $("image").setPointerCapture(event.pointerId);
  last = place(event);
  paint(...last);
  update();
});
$("image").addEventListener("pointermove", (event) => {
  if (!last) return;
  const next = place(event);
  const steps = Math.ceil(2 * Math.hypot(next[0] - last[0], next[1] - last[1])) || 1;
  for (let k = 1; k <= steps; k++) paint(last[0] + ((next[0] - last[0]) * k) / steps, last[1] + ((next[1] - last[1]) * k) / steps);
  last = next;
  update();
});
for (const end of ["pointerup", "pointercancel"]) $("image").addEventListener(end, () => (last = null));

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
$("image").addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move && event.key !== " ") return;
  event.preventDefault();
  cursor = cursor || [width >> 1, height >> 1];
  if (move) cursor = [(cursor[0] + move[0] + width) % width, (cursor[1] + move[1] + height) % height];
  else paint(cursor[0] + 0.5, cursor[1] + 0.5);
  $("keys").textContent = `Column ${cursor[0] + 1}, row ${cursor[1] + 1}; the space bar paints.`;
  update();
});

function choose(image, button) {
  chosen = image && { pixels: image, result: null };
  pixels.set(image || new Uint8Array(pixels.length));
  for (const other of $("gallery").children) other.setAttribute("aria-pressed", other === button);
  $("back").disabled = !image;
  return update();
}
$("clear").addEventListener("click", () => choose(null));
$("back").addEventListener("click", () => {
  pixels.set(chosen.pixels);
  update();
});

// The page.

$("about").textContent = `${network.model}, trained on ${network.data}. It runs in this browser, and nothing leaves it.`;
$("claim").textContent = network.claim;
$("place").textContent = `onelip ${network.onelip}, ONNX Runtime Web ${network.runtime} (WebAssembly, one thread). Weights: sha256 ${network.weights_sha256.slice(0, 16)}…`;
$("light-label").hidden = channels !== 1;
$("colour-label").hidden = channels === 1;
$("size").value = height > 16 ? 1.5 : 0.5;
$("image").style.setProperty("--ratio", `${width} / ${height}`);
for (const name of network.classes) {
  const row = $("scores").insertRow();
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = name;
  row.append(head);
  row.insertCell();
  const bar = document.createElement("progress");
  bar.max = 1;
  bar.setAttribute("aria-label", `Score of ${name}, relative`);
  row.insertCell().append(bar);
}
$("gallery-section").hidden = !network.images.length;
const images = network.images.map((item) => Uint8Array.from(atob(item.pixels), (c) => c.charCodeAt(0)));
images.forEach((image, number) => {
  const button = document.createElement("button");
  const canvas = document.createElement("canvas");
  button.type = "button";
  button.setAttribute("aria-label", `Test image ${number + 1}, labelled ${network.images[number].label}`);
  button.title = network.images[number].label;
  button.append(canvas);
  button.addEventListener("click", () => choose(image, button));
  $("gallery").append(button);
  show(canvas, image);
});

choose(images[0] || null, $("gallery").firstChild);
$("class").textContent = "loading the network";
try {
  session = await ort.InferenceSession.create("model.onnx", { executionProviders: ["wasm"] });
  await update();
} catch (error) {
  $("about").textContent = `The network cannot be run in this browser: ${error.message}`;
  document.body.dataset.error = error.message;
}
