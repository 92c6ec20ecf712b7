(function () {
  var root = document.documentElement, toggle = document.getElementById("theme");
  function stored(value) {
    try { if (value === undefined) return localStorage.getItem("hone-theme"); localStorage.setItem("hone-theme", value); } catch (e) { return null; }
  }
  function dark() {
    var chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function say() { toggle.textContent = dark() ? "Light" : "Dark"; toggle.setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme"); }
  var before = stored();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  toggle.hidden = false; say();
  toggle.addEventListener("click", function () { root.dataset.theme = dark() ? "light" : "dark"; stored(root.dataset.theme); say(); });
  document.querySelectorAll("button.copy").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var code = document.getElementById(button.dataset.from), done = function () { button.textContent = "Copied"; setTimeout(function () { button.textContent = "Copy"; }, 1500); };
      if (navigator.clipboard && window.isSecureContext) { navigator.clipboard.writeText(code.textContent).then(done); return; }
      var range = document.createRange(); range.selectNodeContents(code);
      var selection = getSelection(); selection.removeAllRanges(); selection.addRange(range);
      if (document.execCommand("copy")) { selection.removeAllRanges(); done(); }
    });
  });
  function unfold() {
    var target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  }
  addEventListener("hashchange", unfold); unfold();
  addEventListener("beforeprint", function () { document.querySelectorAll("details").forEach(function (d) { d.open = true; }); });
})();
