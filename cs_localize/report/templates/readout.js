// A touch screen shows no hover text: say below a figure what the mark under the pointer says.
for (const figure of document.querySelectorAll("figure")) {
  const readout = document.createElement("p");
  readout.className = "readout";
  readout.setAttribute("aria-hidden", "true");
  figure.append(readout);
  const read = (event) => {
    const said = event.target.querySelector(":scope > title");
    if (said) readout.textContent = said.textContent;
  };
  figure.addEventListener("pointerover", read);
  figure.addEventListener("click", read);
}
