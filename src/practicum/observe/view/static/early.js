// Asks for the runs and the first one to show while the modules are still on their way; data.js takes the answer.
{
  const run = location.hash.match(/^#\/([^/?]+)/)?.[1] ?? "";
  window.firstAnswer = fetch(`api/first?run=${run}`);
}
