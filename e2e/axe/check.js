// Loads the probe's page, as a real Caddy serves it, in a real browser: in light
// and dark, wide and narrow, in each of its states. It fails on what axe finds
// serious or critical, on anything that the page's own policy blocks, on a style
// that does not apply, and on a page that is wider than its window.
//
//   node check.js <caddy binary> [<directory for screenshots>]
import { spawn } from 'node:child_process'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import axe from 'axe-core'
import { chromium } from 'playwright-core'

const [caddy, screenshots] = process.argv.slice(2)
if (!caddy) {
	console.error('usage: node check.js <caddy binary> [<directory for screenshots>]')
	process.exit(2)
}

// what is asked, and what the page must say of it
const cases = [
	{ name: 'probe', site: 'proxies', path: '/detail', says: 'You are 198.51.100.22', shows: '192.0.2.1',
		chain: '192.0.2.1, unknown, 198.51.100.22, 10.0.0.7', screenshot: true },
	{ name: 'long chain', site: 'proxies', path: '/detail', says: 'You are 198.51.100.22', shows: 'more entries',
		chain: `${'x'.repeat(500)}, ${'2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff, '.repeat(70)}198.51.100.22` },
	{ name: 'unresolved', site: 'proxies', path: '/detail', says: 'Your address is unknown', shows: 'proxy_set_header' },
	{ name: 'malformed', site: 'proxies', path: '/detail', says: 'Your address is unknown', shows: '<b>hello</b>',
		chain: '192.0.2.1, <b>hello</b>' },
	{ name: 'in doubt', site: 'bare', path: '/detail', says: 'You are 127.0.0.1, but look here', shows: 'trusted_proxies static',
		chain: '198.51.100.22' },
	{ name: 'without detail', site: 'proxies', path: '/plain', says: 'You are 198.51.100.22', shows: 'Where is the chain?',
		hides: '10.0.0.7', chain: '198.51.100.22, 10.0.0.7' },
	{ name: 'private', site: 'bare', path: '/plain', says: 'You are 127.0.0.1', shows: 'This is a private address' },
	{ name: 'without edge_limit', site: 'none', path: '/plain', says: 'Your address is unknown', shows: 'no edge_limit came before' },
]
const schemes = ['light', 'dark']
const sizes = { wide: { width: 1100, height: 800 }, narrow: { width: 360, height: 740 } }

let failures = 0
let passes = 0
function judge(where, faults) {
	if (faults.length === 0) {
		passes++
		return
	}
	failures++
	console.error(`not ok: ${where}`)
	for (const fault of faults) console.error(`    ${fault}`)
}

const freePort = () => new Promise((resolve, reject) => {
	const server = createServer().listen(0, '127.0.0.1', () => {
		const { port } = server.address()
		server.close(() => resolve(port))
	}).on('error', reject)
})

async function listening(url) {
	for (let tries = 0; tries < 300; tries++) {
		try {
			await fetch(url)
			return
		} catch {
			await new Promise(resolve => setTimeout(resolve, 100))
		}
	}
	throw new Error(`nothing listens at ${url}`)
}

async function look(page, test, scheme, size) {
	const faults = []
	const blocked = message => {
		if (/Content Security Policy|Refused to/.test(message.text())) faults.push(message.text())
	}
	page.on('console', blocked)
	const headers = { Accept: 'text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8' }
	if (test.chain) headers['X-Forwarded-For'] = test.chain
	await page.setExtraHTTPHeaders(headers)
	await page.goto(test.url)

	const heading = await page.textContent('h1')
	if (heading !== test.says) faults.push(`the heading says ${JSON.stringify(heading)}`)
	const text = await page.textContent('body')
	if (!text.includes(test.shows)) faults.push(`the page does not show ${JSON.stringify(test.shows)}`)
	if (test.hides && text.includes(test.hides)) faults.push(`the page shows ${JSON.stringify(test.hides)}`)
	const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor)
	if (ground !== (scheme === 'dark' ? 'rgb(20, 23, 27)' : 'rgb(246, 247, 249)')) faults.push(`the ground is ${ground}: the style does not apply`)
	const [needed, given] = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth])
	if (needed > given) faults.push(`the page needs ${needed} pixels of ${given}`)

	await page.evaluate(axe.source)
	const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }))
	for (const { id, impact, help, nodes } of violations) {
		const finding = `axe, ${impact}: ${id}: ${help}: ${nodes.map(node => node.html).slice(0, 3).join(' ')}`
		if (impact === 'serious' || impact === 'critical') faults.push(finding)
		else console.log(`remark: ${test.name}, ${scheme}, ${size}: ${finding}`)
	}
	if (screenshots && test.screenshot) {
		const path = join(screenshots, `${test.name}-${scheme}${size === 'wide' ? '' : '-' + size}.png`)
		await page.screenshot({ path, fullPage: true })
	}
	page.off('console', blocked)
	judge(`${test.name}, ${scheme}, ${size}`, faults)
}

const home = await mkdtemp(join(tmpdir(), 'edge_limit-axe-'))
let server, ended, browser
try {
	const ports = { proxies: await freePort(), bare: await freePort(), none: await freePort() }
	const site = (port, client) => `http://:${port} {
	bind 127.0.0.1
	${client}
	edge_limit_probe /detail {
		detail
	}
	edge_limit_probe /plain
}
`
	await writeFile(join(home, 'Caddyfile'), `{
	admin off
	auto_https off
}
` + site(ports.proxies, `edge_limit {
		client {
			trusted_proxies static 127.0.0.1 10.0.0.0/8
		}
	}`) + site(ports.bare, 'edge_limit') + site(ports.none, ''))
	server = spawn(caddy, ['run', '--adapter', 'caddyfile', '--config', join(home, 'Caddyfile')], {
		env: { ...process.env, HOME: home, XDG_DATA_HOME: home, XDG_CONFIG_HOME: home }, stdio: ['ignore', 'ignore', 'pipe'],
	})
	let output = ''
	server.stderr.on('data', chunk => { output += chunk })
	ended = new Promise(resolve => server.on('exit', code => {
		if (code) console.error(output)
		resolve()
	}))
	for (const test of cases) test.url = `http://127.0.0.1:${ports[test.site]}${test.path}`
	await listening(cases[0].url)

	browser = await chromium.launch({
		executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
		args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
			'--disable-component-update', '--disable-sync'],
	})
	for (const colorScheme of schemes) {
		for (const [size, viewport] of Object.entries(sizes)) {
			const context = await browser.newContext({ colorScheme, viewport })
			const page = await context.newPage()
			for (const test of cases) await look(page, test, colorScheme, size)
			await context.close()
		}
	}
} finally {
	await browser?.close()
	server?.kill()
	await ended // it writes until it ends
	await rm(home, { recursive: true, force: true })
}
console.log(`${passes} passed, ${failures} failed`)
process.exitCode = failures === 0 ? 0 : 1
