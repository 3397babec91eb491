// The search runs in a Worker, which browsers refuse to a page that was opened from the disk. There, a hidden frame of
// the page takes its place. The name IFrameWorker tells the theme's search where it runs.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.document.open() // else Firefox puts another document there, later
      this.inside.document.write("<!doctype html><body></body>")
      this.inside.document.close()

      const load = source => new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script")
        this.inside.document.body.append(Object.assign(script, {src: source, onload: loaded, onerror: failed}))
      })
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      this.ready = load(url)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
