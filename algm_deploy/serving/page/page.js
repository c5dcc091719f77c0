"use strict";

// Sends a photo as a request of the Open Inference Protocol and draws the answer. Nothing is loaded from elsewhere.
const element = (id) => document.getElementById(id);
let model = null; // the server's metadata of the network
let photo = null; // the file that was chosen last
let request = 0; // number of the latest one: answers to earlier ones are dropped

function say(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

async function answer(response) {
  if (response.ok) return response;
  const text = await response.text();
  let told = text;
  try { told = JSON.parse(text).error; } catch { /* no answer of this server's own */ }
  throw new Error(told || `the server answered ${response.status}`);
}

async function start() {
  const known = await (await answer(await fetch("page/model.json"))).json();
  model = known;
  const about = model.parameters;
  element("network").textContent = `${about.network}, ${model.platform} on ${about.device}`;
  for (const [name, field] of [["clap_threshold", "tau"], ["gbm_threshold", "gbm"]]) {
    if (!(name in about.thresholds)) continue;
    element("merging").hidden = element(`${field}-field`).hidden = false;
    element(field).value = about.thresholds[name];
  }
}

function parameters() {
  if (element("merging").hidden) return {};
  if (element("dense").checked) return { dense: true };
  const given = {};
  for (const field of ["tau", "gbm"]) {
    const value = element(field).valueAsNumber;
    if (!element(`${field}-field`).hidden && Number.isFinite(value)) given[field] = value;
  }
  return given;
}

async function ask(content) {
  const outputs = model.outputs.map((one) => one.name).filter((name) => name !== "labels_png");
  const head = new TextEncoder().encode(JSON.stringify({
    inputs: [{
      name: "encoded_image", datatype: "BYTES", shape: [1],
      parameters: { binary_data_size: content.byteLength + 4 },
    }],
    outputs: outputs.map((name) => ({ name, parameters: { binary_data: name === "labels" || name === "tokens_png" } })),
    parameters: parameters(),
  }));
  const length = new DataView(new ArrayBuffer(4));
  length.setUint32(0, content.byteLength, true);
  return answer(await fetch(`v2/models/${model.name}/infer`, {
    method: "POST",
    headers: { "content-type": "application/octet-stream", "inference-header-content-length": String(head.byteLength) },
    body: new Blob([head, length, content]),
  }));
}

async function outputsOf(response) {
  const body = await response.arrayBuffer();
  let place = Number(response.headers.get("inference-header-content-length"));
  const head = JSON.parse(new TextDecoder().decode(body.slice(0, place)));
  const found = {};
  for (const output of head.outputs) {
    const size = output.parameters?.binary_data_size;
    found[output.name] = output;
    if (size === undefined) continue;
    output.bytes = body.slice(place, place + size);
    place += size;
  }
  return found;
}

function drawLabels(labels) {
  const [, height, width] = labels.shape;
  const values = labels.datatype === "UINT8" ? new Uint8Array(labels.bytes) : new Int32Array(labels.bytes);
  const colors = Uint32Array.from(model.parameters.palette, ([red, green, blue]) => 0xff000000 + (blue << 16) + (green << 8) + red);
  const counts = new Array(colors.length).fill(0);
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer); // red comes first in memory, as browsers run on little-endian machines
  values.forEach((value, index) => {
    counts[value] += 1;
    pixels[index] = colors[value];
  });
  const canvas = element("labels");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return [...counts.entries()].filter((entry) => entry[1]).sort((a, b) => b[1] - a[1])
    .map(([value, count]) => [value, count / values.length]);
}

const percent = (share) => (share < 0.01 ? "below 1 %" : `${Math.round(100 * share)} %`);

function row(table, cells, color) {
  const line = table.insertRow();
  cells.forEach((text, index) => {
    const cell = line.insertCell();
    if (index === 0 && color) {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = `rgb(${color.join(" ")})`;
      cell.append(swatch);
    }
    cell.append(text);
  });
}

function show(found) {
  const shares = drawLabels(found.labels);
  const { classes, palette, merges } = model.parameters;
  element("classes").replaceChildren();
  for (const [value, share] of shares) row(element("classes"), [classes[value], percent(share)], palette[value]);
  const patches = found.patches.data[0];
  element("merges").replaceChildren();
  row(element("merges"), ["(patches)", String(patches), "100 %"]);
  (found.token_counts?.data ?? []).forEach((count, index) => {
    row(element("merges"), [merges[index], String(count), percent(count / patches)]);
  });
  element("tokens-figure").hidden = !found.tokens_png;
  if (found.tokens_png) setPicture(element("tokens"), new Blob([found.tokens_png.bytes.slice(4)], { type: "image/png" }));
  element("labels").setAttribute("aria-label", `Classes of the photo: ${shares.slice(0, 5)
    .map(([value, share]) => `${classes[value]} ${percent(share)}`).join(", ")}`);
  element("result").hidden = false;
  const last = found.token_counts?.data.at(-1) ?? patches;
  return `Done: ${last} tokens of ${patches} patches left.`;
}

function setPicture(image, blob) {
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
}

async function run() {
  if (!photo || !model) return;
  const number = ++request;
  say(`Segmenting ${photo.name} ...`);
  const began = performance.now();
  try {
    const found = await outputsOf(await ask(await photo.arrayBuffer()));
    if (number !== request) return;
    setPicture(element("shown"), photo);
    const told = show(found);
    say(`${told} ${Math.round(performance.now() - began)} ms with the way there and back.`);
  } catch (error) {
    if (number === request) say(error.message, true);
  }
}

function choose(files) {
  if (!files.length) return;
  photo = files[0];
  run();
}

element("form").addEventListener("submit", (event) => event.preventDefault());
element("photo").addEventListener("change", (event) => choose(event.target.files));
for (const field of ["tau", "gbm", "dense"]) element(field).addEventListener("change", run);
element("opacity").addEventListener("input", (event) => {
  element("labels").style.opacity = event.target.value / 100;
});
element("labels").style.opacity = 0.6;
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  element("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    element("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
    if (kind === "drop") choose(event.dataTransfer.files);
  });
}
start().then(run, (error) => say(error.message, true));
