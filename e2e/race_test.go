//go:build race

package e2e

// The Caddy under test reports data races too.
const raceDetector = true
