// Tabs as WAI-ARIA describes them: arrow keys move, and the tab that has the focus is shown.

/** Make `list` work; `onSelect(tab)` is called with each tab that is shown. Return a function that shows one. */
export function tabs(list, onSelect) {
  const all = [...list.children];
  const select = (tab) => {
    for (const one of all) {
      one.setAttribute("aria-selected", one === tab);
      one.tabIndex = one === tab ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = one !== tab;
    }
    onSelect(tab);
  };
  list.addEventListener("click", (event) => all.includes(event.target) && select(event.target));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tab = all[(all.indexOf(event.target) + step + all.length) % all.length];
    tab.focus();
    select(tab);
  });
  return select;
}
