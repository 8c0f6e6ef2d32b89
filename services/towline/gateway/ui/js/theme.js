// Before the page is drawn: the theme that was chosen last; "auto" follows the system.
(() => {
  const read = () => {
    try {
      return localStorage.getItem("towline-theme") || "auto";
    } catch {
      return "auto";
    }
  };
  const apply = (name) => {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", name);
  };
  apply(read());
  window.towlineTheme = {
    get: read,
    next() {
      const order = ["auto", "light", "dark"];
      const name = order[(order.indexOf(read()) + 1) % order.length];
      try {
        localStorage.setItem("towline-theme", name);
      } catch {
        // Private windows may refuse: then it holds until the page is left.
      }
      apply(name);
      return name;
    },
  };
})();
