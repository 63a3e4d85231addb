(() => {
    const c = document.createElement('canvas').getContext('2d')
    return ['sans-serif', 'Arial', 'Verdana, system-ui', 'serif', 'Nothing', 'monospace', 'Courier New'].map(f => (c.font = '100px ' + f, c.measureText('Wim').width))
})()
