"use strict";
// Tokens: what colors them, and the numbers of the one that is pointed at.
for (const view of document.querySelectorAll(".view")) {
  const numbers = view.querySelector(".numbers");
  view.addEventListener("change", (event) => { view.dataset.by = event.target.value; });
  for (const kind of ["mouseover", "click", "focusin"]) {
    view.addEventListener(kind, (event) => {
      const token = event.target.closest(".flow span");
      if (token) numbers.textContent = `“${token.textContent}” ${token.title}`;
    });
  }
  // The keyboard: one stop of Tab for a completion, and arrows from token to token. A title is what
  // a screen reader says after the text of an option.
  for (const flow of view.querySelectorAll(".flow")) {
    flow.setAttribute("role", "listbox");
    flow.setAttribute("aria-label", "Tokens");
    const tokens = [...flow.querySelectorAll("span")];
    tokens.forEach((token, place) => {
      token.setAttribute("role", "option");
      token.tabIndex = place ? -1 : 0;
    });
    flow.addEventListener("keydown", (event) => {
      const place = tokens.indexOf(event.target);
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (place < 0 || !tokens[to]) return;
      event.preventDefault();
      tokens[place].tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    });
  }
}
