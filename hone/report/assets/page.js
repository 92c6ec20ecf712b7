(function () {
  var root = document.documentElement, toggle = document.getElementById("theme");
  function stored(value) {
    try { if (value === undefined) return localStorage.getItem("hone-theme"); localStorage.setItem("hone-theme", value); } catch (e) { return null; }
  }
  function dark() {
    var chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function say() {
    toggle.textContent = dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme");
  }
  var before = stored();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  toggle.hidden = false; say();
  toggle.addEventListener("click", function () { root.dataset.theme = dark() ? "light" : "dark"; stored(root.dataset.theme); say(); });

  document.querySelectorAll("button.copy").forEach(function (button) {
    var code = document.getElementById(button.dataset.from);
    function done(words) { button.textContent = words; setTimeout(function () { button.textContent = "Copy"; }, 2000); }
    function select() {
      var range = document.createRange(), selection = getSelection();
      range.selectNodeContents(code); selection.removeAllRanges(); selection.addRange(range);
      done(document.execCommand("copy") ? "Copied" : "Selected");
    }
    button.hidden = false;
    button.addEventListener("click", function () {
      if (!navigator.clipboard) return select();
      navigator.clipboard.writeText(code.textContent).then(function () { done("Copied"); }, select);
    });
  });

  // Tables that a wide screen has room for; a phone shows them on request.
  if (matchMedia("(min-width: 761px)").matches) document.querySelectorAll("details.fold").forEach(function (one) { one.open = true; });
  addEventListener("beforeprint", function () { document.querySelectorAll("details.fold").forEach(function (one) { one.open = true; }); });

  function unfold() {
    var target = location.hash && document.getElementById(location.hash.slice(1));
    for (var here = target; here; here = here.parentElement) if (here.tagName === "DETAILS") here.open = true;
    if (target && target.tagName === "DETAILS") target.scrollIntoView();
  }
  addEventListener("hashchange", unfold); unfold();
})();
