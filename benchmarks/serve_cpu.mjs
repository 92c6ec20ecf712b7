// llama.cpp beside `python -m benchmarks.serve_cpu`: node-llama-cpp with its prebuilt binary. One GGUF file; reads the name of a
// measurement from each line of standard input, writes tokens/s.  node serve_cpu.mjs NODE_MODULES THREADS FILE.gguf
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [modules, threads, file] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: +threads});
const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
const streams = 8;
const context = await model.createContext({contextSize: 1024, sequences: streams, threads: +threads, batchSize: 512});
const sequences = Array.from({length: streams}, () => context.getSequence());
const prompt = (count, step) => Array.from({length: count}, (_, j) => (j * step) % 8000 + 3);

// Tokens after the first, and when the first and the last came.
async function decode(sequence, tokens, count) {
  await sequence.clearHistory();
  let made = 0, first = 0;
  for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
    if (made === 0) first = performance.now();
    if (++made >= count) break;
  }
  return {made: made - 1, first, last: performance.now()};
}

const measure = {
  async decode() {
    const one = await decode(sequences[0], prompt(64, 7), 65);
    return one.made / (one.last - one.first) * 1e3;
  },
  async streams() {
    const all = await Promise.all(sequences.map((one, i) => decode(one, prompt(64, 7 + i), 65)));
    const first = Math.max(...all.map((one) => one.first)), last = Math.max(...all.map((one) => one.last));
    return all.reduce((sum, one) => sum + one.made, 0) / (last - first) * 1e3;
  },
  // The same with one token: what is not decoding.
  async decode1() {
    return (await decode(sequences[0], prompt(64, 7), 1)).made;
  },
  async streams1() {
    return (await Promise.all(sequences.map((one, i) => decode(one, prompt(64, 7 + i), 1)))).length;
  },
  async prefill() {
    const begun = performance.now();
    const one = await decode(sequences[0], prompt(512, 13), 1);
    return 512 / (one.first - begun) * 1e3;
  },
};

for await (const line of createInterface({input: process.stdin})) console.log(await measure[line.trim()]());
process.exit(0);
