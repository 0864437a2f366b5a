// Keeps the page as new as the project: only what changed is replaced.
(function () {
  "use strict";
  const EVERY = 2000;
  const shown = {};
  let drawn = document.getElementById("charts").textContent, lastContact = Date.now();

  function say(text) {
    const place = document.getElementById("contact");
    place.hidden = !text;
    place.textContent = text;
  }

  async function look() {
    const answer = await fetch("/api/parts", { cache: "no-store" });
    if (!answer.ok) {
      const error = await answer.json().catch(() => ({ what: "the dashboard answers " + answer.status }));
      throw new Error(error.what + (error.where ? " (" + error.where + ")" : ""));
    }
    const news = await answer.json();
    if (!document.querySelector("main")) { window.location.reload(); return; }
    let replaced = false;
    for (const [id, html] of Object.entries(news.parts)) {
      const place = document.getElementById(id);
      if (place && shown[id] !== html) {
        place.innerHTML = html;
        shown[id] = html;
        replaced = true;
      }
    }
    const charts = JSON.stringify(news.charts);
    if (replaced || charts !== drawn) { drawn = charts; await window.eyasDraw(news.charts); }
  }

  async function again() {
    if (!document.hidden) {
      try {
        await look();
        lastContact = Date.now();
        say("");
      } catch (error) {
        say("Not live for " + Math.round((Date.now() - lastContact) / 1000) + " s: " + error.message);
      }
      document.documentElement.dataset.looks = String(Number(document.documentElement.dataset.looks || 0) + 1);
    }
    window.setTimeout(again, EVERY);
  }

  window.eyasDraw(JSON.parse(drawn)).then(() => window.setTimeout(again, EVERY));
})();
