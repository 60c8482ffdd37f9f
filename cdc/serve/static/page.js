"use strict";
// Keeps the page current: whenever the server has something new, the page is read again and its live parts are
// replaced. Without this script the page shows what was so when it was loaded.

const lost = document.getElementById("lost");
let reading = false, again = false;

function showLost(text) {
  if (lost.textContent === text) return;
  lost.textContent = text;
  lost.hidden = !text;
}

// Text that somebody is about to copy stays.
function isSelected(part) {
  const selection = getSelection();
  return !selection.isCollapsed && part.contains(selection.anchorNode);
}

function replaceLive(fresh) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    if (!next) continue;
    if (part.className !== next.className) part.className = next.className;
    if (part.innerHTML === next.innerHTML || isSelected(part)) continue;
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    part.innerHTML = next.innerHTML;
    showCopyButtons(part);
    if (focused) document.getElementById(focused)?.focus({preventScroll: true});
  }
}

async function read() {
  if (document.hidden) return;
  if (reading) { again = true; return; }
  reading = true;
  try {
    const answer = await fetch(location.href, {headers: {Accept: "text/html"}, cache: "no-store"});
    // A proxy in front wants a login again, which a reload shows.
    if (answer.redirected || answer.status === 401) { location.reload(); return; }
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (answer.ok) replaceLive(fresh);
    showLost("");
  } catch {
    showLost("cdc serve gives no answer: what is shown is old.");
  } finally {
    reading = false;
  }
  if (again) { again = false; setTimeout(read, 800); }
}

function showCopyButtons(part) {
  if (!navigator.clipboard) return;
  for (const button of part.querySelectorAll("[data-copy]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  button.firstChild.textContent = "Copied";
  setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
});

showCopyButtons(document);
// A runbook and an error page have nothing to follow.
if (document.querySelector("main [data-live]")) {
  const events = new EventSource("/events");
  events.addEventListener("sample", read);
  document.addEventListener("visibilitychange", read);
  events.addEventListener("error", () => showLost("cdc serve gives no answer: what is shown is old."));
}
