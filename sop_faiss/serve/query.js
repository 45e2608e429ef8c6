"use strict";
// What is searched by: in the address of the page, in the strip of several images, and as it is sent.

const at = (id) => document.getElementById(id);
const uploads = new Map(); // number -> { file, address }; lost when the page is left
const known = new Map(); // key -> what the server said of the image

const DEFAULT_K = at("k").value;
const FILTERS = ["label", "where", "unique", "rerank", "parts"]; // empty: none
const NO_QUERY = { plus: [], minus: [], box: null };
const START = { ...NO_QUERY, label: "", folder: null, where: "" };

function asked() {
  const search = new URLSearchParams(location.search);
  const view = { plus: [], minus: [], box: search.get("box"), folder: search.get("folder"), k: search.get("k") || DEFAULT_K };
  for (const name of FILTERS) view[name] = search.get(name) || "";
  for (const [name, value] of search) {
    if (name === "key" || name === "upload") view.plus.push({ [name]: value });
    if (name === "minus-key" || name === "minus-upload") view.minus.push({ [name.slice("minus-".length)]: value });
  }
  return view;
}

function addressOf(view) {
  const search = new URLSearchParams();
  for (const [sign, images] of [["", view.plus], ["minus-", view.minus]]) {
    for (const image of images) for (const [name, value] of Object.entries(image)) search.append(sign + name, value);
  }
  if (view.box) search.set("box", view.box);
  if (view.folder !== null) search.set("folder", view.folder);
  for (const name of FILTERS) if (view[name]) search.set(name, view[name]);
  if (view.k !== DEFAULT_K) search.set("k", view.k);
  const text = search.toString();
  return text ? "/?" + text : "/";
}

const same = (one, other) => one.key === other.key && one.upload === other.upload;
const isSeveral = (view) => view.plus.length + view.minus.length > 1;

// The query with an image on one of its sides, or on none; a query that would be only less something is none.
function queryWith(image, side) {
  const { plus, minus, box } = asked();
  const sides = { plus: plus.filter((each) => !same(each, image)), minus: minus.filter((each) => !same(each, image)) };
  if (side) sides[side].push(image);
  if (!sides.plus.length) return NO_QUERY;
  return { ...sides, box: plus.length && same(sides.plus[0], plus[0]) ? box : null };
}

// The part of the address as four shares of the sides; null without one, or where it is in pixels.
function sharesOf(box) {
  const numbers = box ? box.split(",").map(Number) : [];
  return numbers.length === 4 && numbers.every((number) => number <= 1) ? numbers : null;
}

function uploadOf(image) {
  const found = uploads.get(image.upload);
  if (!found) throw new Error("An image of this address is from an earlier visit: choose it again.");
  return found;
}

function requireSize(file) {
  if (file.size <= facts.max_upload_bytes) return;
  throw new Error(`the image has ${megabytes(file.size)}, the limit is ${megabytes(facts.max_upload_bytes)}`);
}

// What the server is sent of one of several images.
async function sent(image) {
  if (image.key !== undefined) return { key: image.key };
  const { file } = uploadOf(image);
  requireSize(file);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 0x8000) text += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  return { image: btoa(text) };
}

function remember(images) {
  for (const image of images) if (image) known.set(image.key, image);
}

function showStrip(view) {
  at("with").hidden = false;
  at("with").replaceChildren(...view.plus.map((image) => chip(image, "plus", view)), ...view.minus.map((image) => chip(image, "minus", view)));
}

function chip(image, side, view) {
  const upload = uploads.get(image.upload);
  const name = image.key ?? ((upload && upload.file.name) || "your image");
  const src = image.key === undefined ? upload && upload.address : known.get(image.key) && known.get(image.key).thumbnail;
  const made = element("li", side === "plus" ? "chip" : "chip less");
  const picture = element(src ? "img" : "span", src ? "" : "problem", src ? undefined : name);
  if (src) [picture.src, picture.alt, picture.title] = [src, name, name];
  const isPlus = side === "plus";
  const sign = button(isPlus ? "+" : "−", () => go(queryWith(image, isPlus ? "minus" : "plus")), "");
  sign.disabled = isPlus && view.plus.length === 1; // something must be searched by
  sign.title = isPlus ? "Search for less like it" : "Search for more like it";
  sign.setAttribute("aria-label", `${name} is ${isPlus ? "wanted" : "unwanted"}: change that`);
  const remove = button("✕", () => go(queryWith(image, null)), "");
  remove.setAttribute("aria-label", `Remove ${name}`);
  const buttons = element("div");
  buttons.append(sign, remove);
  made.append(picture, buttons);
  return made;
}

// Searches by image files, or by what is searched by and these.
function upload(files, before = []) {
  if (!files.length || !facts || !facts.accepts_images) return;
  const images = [...files].map((file) => {
    const number = String(uploads.size + 1);
    uploads.set(number, { file, address: URL.createObjectURL(file) });
    return { upload: number };
  });
  go(before.length ? { plus: [...before, ...images] } : { ...NO_QUERY, plus: images });
}
