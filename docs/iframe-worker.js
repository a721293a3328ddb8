// The search of the site for pages that are opened from a disk: a browser starts no worker from a file. Here a hidden frame of
// the page takes the worker's place. Pages that come from a server keep the browser's own workers.
(function () {
  "use strict";
  if (location.protocol !== "file:") {
    return;
  }
  function FileWorker(address) {
    var url = String(new URL(address, location.href));
    var target = new EventTarget();
    var frame = document.createElement("iframe");
    var waiting = [];
    var isReady = false;
    frame.hidden = true;
    frame.srcdoc = "<script>" +
      "var base = " + JSON.stringify(url) + ";" +
      "var listeners = [];" +
      "function addEventListener(type, listener) { if (type === 'message') { listeners.push(listener); } }" +
      "function postMessage(data) { parent.postMessage({file_worker: base, data: data}, '*'); }" +
      "function importScripts() {" +
      "  return Array.prototype.reduce.call(arguments, function (done, name) {" +
      "    return done.then(function () { return new Promise(function (resolve, reject) {" +
      "      var script = document.createElement('script');" +
      "      script.src = new URL(name, base); script.onload = resolve; script.onerror = reject;" +
      "      document.head.appendChild(script);" +
      "    }); });" +
      "  }, Promise.resolve());" +
      "}" +
      "function receive(data) { listeners.forEach(function (listener) { listener({data: data}); }); }" +
      "<\/script><script src=" + JSON.stringify(url) + "><\/script>";
    frame.addEventListener("load", function () {
      isReady = true;
      waiting.splice(0).forEach(function (data) { frame.contentWindow.receive(data); });
    });
    window.addEventListener("message", function (event) {
      if (event.source === frame.contentWindow && event.data && event.data.file_worker === url) {
        target.dispatchEvent(new MessageEvent("message", {data: event.data.data}));
      }
    });
    target.postMessage = function (data) {
      if (isReady) {
        frame.contentWindow.receive(data);
      } else {
        waiting.push(data);
      }
    };
    target.terminate = function () { frame.remove(); };
    document.body.appendChild(frame);
    return target;
  }
  window.Worker = FileWorker;
})();
