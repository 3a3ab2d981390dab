// A box above the tables of keys that hides the rows without the words typed into it.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.getElementById("all-keys");
  if (!page) return;
  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = "Filter keys";
  box.setAttribute("aria-label", "Filter keys");
  box.className = "filter-keys";
  page.querySelector("h1").after(box);
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    page.classList.toggle("filtered", box.value.trim() !== "");
    for (const row of page.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const table of page.querySelectorAll(".table-wrapper")) {
      table.hidden = !table.querySelector("tbody tr:not([hidden])");
    }
    for (const section of page.querySelectorAll("section")) {
      section.hidden = !section.querySelector("tbody tr:not([hidden])");
    }
  };
  box.addEventListener("input", filter);
});
