(function () {
  var root = document.documentElement, toggle = document.getElementById("theme");
  var runs = document.getElementById("runs"), state = document.getElementById("state");
  var stream = null, width = 0;
  function stored(value) {
    try { if (value === undefined) return localStorage.getItem("hone-theme"); localStorage.setItem("hone-theme", value); } catch (e) { return null; }
  }
  function dark() {
    var chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function label() {
    toggle.textContent = dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme");
  }
  var before = stored();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  toggle.hidden = false; label();
  toggle.addEventListener("click", function () { root.dataset.theme = dark() ? "light" : "dark"; stored(root.dataset.theme); label(); });

  function ages() {
    runs.querySelectorAll("time").forEach(function (one) {
      var s = Math.max(0, Math.round(Date.now() / 1000 - one.dataset.at));
      one.textContent = s < 120 ? s + " s ago" : s < 7200 ? Math.round(s / 60) + " min ago" : Math.round(s / 3600) + " h ago";
    });
  }
  function say(words, lost) { state.textContent = words; state.className = lost ? "lost" : ""; }
  function open() {
    var style = getComputedStyle(runs);
    var room = runs.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    room = Math.floor(room / 10) * 10;
    if (stream && room === width && stream.readyState !== EventSource.CLOSED) return;
    width = room;
    if (stream) stream.close();
    stream = new EventSource("events?width=" + width);
    stream.onmessage = function (event) {
      var y = scrollY;
      runs.innerHTML = JSON.parse(event.data);
      scrollTo(0, y); ages(); say("Up to date", false);
    };
    stream.onerror = function () { say("The connection to hone watch is lost; trying again", true); };
  }
  var later = 0;
  addEventListener("resize", function () { clearTimeout(later); later = setTimeout(open, 300); });
  setInterval(ages, 1000);
  setInterval(function () { if (!stream || stream.readyState === EventSource.CLOSED) open(); }, 5000);
  open();
})();
